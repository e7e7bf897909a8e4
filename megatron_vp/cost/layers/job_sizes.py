"""Converts Megatron's arguments, named as in its parsed namespace, to the sizes from which costs are computed."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_vp.cost.layers.shapes import Delta, Fp8Recipe, Job, Latent, ModelShape, Recompute
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.job_config import TWO_BATCHES, last_batch
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.layer_kind import LayerKind, layer_kind
from megatron_vp.jobs.layout_text import stages_behind_mtp
from megatron_vp.jobs.pattern_text import pattern_in

_REQUIRED = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"), ""),
    **{"num_layers": "hybrid_layer_pattern", "vocab_size": "padded_vocab_size"},
}
"""The sizes without a default, each with the argument that replaces it."""

_ARGUMENTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def job_of(arguments: Mapping[str, Any], ranks: int | None = None) -> Job:
    """The job that `arguments` describe on `ranks` ranks. Missing optional arguments have Megatron's defaults.

    If `ranks` is None, the job has the smallest number of replicas that can hold the experts. Raises UserError if a
    size is missing or if sizes contradict each other.
    """
    a = Arguments.given(arguments)
    absent = [name for name, other in _REQUIRED.items() if arguments.get(name) is None and arguments.get(other) is None]
    if absent:
        raise UserError(
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing: give a configuration, as in "
            "`megatron-vp plan llama3_8b [FLAGS]`, or flags "
            f"such as {option_of(absent[0])} N"
        )
    model, sizes = _model(a), _fields(a, "job")
    pipeline, tensor, context, micro_batch = (sizes[each] for each in ("pipeline", "tensor", "context", "micro_batch"))
    if a.bf16 and a.fp16:
        raise UserError(
            "bf16 and fp16 are both on, but a model can use only one of them: leave one out, or set it to false"
        )
    fp8, bf16_at_start, bf16_at_end = _fp8(a, model.layers, pipeline)
    kind, (kept_states, takes_gradients) = layer_kind(arguments), _states(a, fp8)
    replica = pipeline * tensor * context
    data = max(1, sizes["expert"] * (a.expert_tensor_parallel_size or tensor) // (tensor * context))
    if ranks is not None:
        data = ranks // replica
        if not data or ranks % replica:
            raise UserError(
                f"{ranks} ranks cannot be divided into replicas of {replica} ranks ({pipeline} pipeline x {tensor} "
                f"tensor x {context} context): use a multiple of {replica}"
            )
    batch = a.global_batch_size or micro_batch * data
    if a.step_batch_size_schedule is not None:
        if a.global_batch_size is not None:
            raise UserError(TWO_BATCHES)
        batch = last_batch(a.step_batch_size_schedule)
    if batch % (micro_batch * data):
        raise UserError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro_batch} times the data-"
            f"parallel size {data}: use a multiple of {micro_batch * data}"
        )
    selective = a.recompute_granularity == "selective"
    return Job(
        model,
        **sizes,
        microbatches=batch // (micro_batch * data),
        data=data,
        recompute=Recompute.FULL if a.recompute_granularity == "full" else Recompute.NONE,
        recompute_modules=modules_in(arguments, "recompute_modules", selective),
        wide_gradients=_wide_gradients(a),
        element_bytes=2 if a.bf16 or a.fp16 else 4,
        fp8=fp8,
        bf16_at_start=bf16_at_start,
        bf16_at_end=bf16_at_end,
        cross_entropy=a.cross_entropy_fusion_impl if a.cross_entropy_loss_fusion else "eager",
        layers=kind,
        # Recipes with experts do not use Megatron's default, allgather.
        dispatcher="" if a.moe_token_dispatcher_type == "allgather" else a.moe_token_dispatcher_type,
        flash_attention_2=_flash_attention_2(a, fp8),
        glu_intermediates=_glu_intermediates(a, kind, model.experts > 0),
        attention_dropout=bool(a.attention_dropout),
        wide_softmax=bool(a.attention_softmax_in_fp32 or a.apply_query_key_layer_scaling),
        kept_states=kept_states,
        takes_gradients=takes_gradients,
        capacity=_capacity(a),
        reserved=_reserved(a),
        fp8_output=bool(a.fp8_output_proj and fp8),
        muon=a.muon_num_ns_steps if a.optimizer in ("muon", "dist_muon") else 0,
        offloaded_modules=modules_in(arguments, "offload_modules", a.fine_grained_activation_offloading),
    )


def _fields(a: Arguments, part: str) -> dict[str, Any]:
    """The fields of a part of the job that are Megatron's arguments as they stand: see job_sizes.toml."""
    found = {field: getattr(a, name) for field, name in _ARGUMENTS[part].items()}
    return {field: value for field, value in found.items() if value is not None}


def _capacity(a: Arguments) -> float:
    """Tokens that experts compute, relative to those that the router sends to them, all experts being equally popular.

    A capacity factor below 1 drops tokens. A larger one matters only if all experts' inputs are padded to it.
    """
    factor = a.moe_expert_capacity_factor
    if factor is None or factor < 0:
        return 1.0
    return factor if a.moe_pad_expert_input_to_capacity else min(1.0, factor)


def _reserved(a: Arguments) -> float:
    """Room in the buffers that keep experts' tokens, relative to the tokens. The paged stash keeps only real tokens, in
    pages with a share of their own.
    """
    if a.moe_paged_stash:
        return abs(a.moe_paged_stash_buffer_size_factor_cuda)
    return a.moe_expert_rank_capacity_factor or 1.0


def _model(a: Arguments) -> ModelShape:
    sizes, experts, pattern = _fields(a, "model"), a.num_experts or 0, pattern_in(vars(a))
    hidden = sizes["hidden"]
    if pattern is not None and "E" not in pattern.letters:
        experts = 0
    elif pattern is not None and not experts:
        raise UserError("--hybrid-layer-pattern has experts (E), but their number is missing: add --num-experts")
    # Megatron's default for `ffn_hidden_size` is 4 h; with SwiGLU, it is 8/3 h, rounded down to a multiple of 64.
    dense_ffn = a.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if a.swiglu else 4 * hidden)
    rows = a.make_vocab_size_divisible_by * a.tensor_model_parallel_size
    padded, tokens = a.padded_vocab_size, a.vocab_size
    if padded and padded < (tokens or 0):
        raise UserError(
            f"padded_vocab_size {padded} is smaller than vocab_size {tokens}: give at least vocab_size, or leave "
            "padded_vocab_size out"
        )
    layers = a.num_layers if pattern is None else len(pattern.letters)
    letters = pattern.letters if pattern is not None else _letters(a, layers, experts)
    latent = Latent(**_fields(a, "latent")) if a.multi_latent_attention else None
    window = re.search(r"-?\d+", str(a.window_size or ""))
    return ModelShape(
        **sizes,
        layers=layers,
        ffn=a.moe_ffn_hidden_size or dense_ffn if experts else dense_ffn,
        vocab=padded or math.ceil(tokens / rows) * rows,
        kv_groups=a.num_query_groups if a.group_query_attention else 0,
        head_size=a.kv_channels or 0 if latent is None else a.qk_head_dim + latent.rotary,
        gated=bool(a.swiglu or a.quick_geglu),
        tied=not a.untie_embeddings_and_output_weights,
        dropout=bool(a.hidden_dropout),
        experts=experts,
        experts_per_token=a.moe_router_topk if experts else 0,
        # In latent attention, both options are for norms of the compressed tensors, which are counted separately.
        query_key_norms=bool(a.qk_layernorm or a.qk_l2_norm) and latent is None,
        rotary=a.position_embedding_type == "rope" or latent is not None,
        pattern=letters,
        dense_ffn=dense_ffn if experts and letters else 0,
        shared_ffn=a.moe_shared_expert_intermediate_size or 0 if experts else 0,
        latent=latent,
        mtp_heads=(letters[-1:] or "t",) * (a.mtp_num_layers or 0) if pattern is None else pattern.heads,
        behind_mtp=stages_behind_mtp(str(a.pipeline_model_parallel_layout or "")),
        window=max(0, int(window[0]) + 1) if window else 0,
        windowed=_windowed(a) if window and int(window[0]) >= 0 else 0.0,
        clamped=a.activation_func_clamp_value is not None,
        expert_biases=_biases(a),
        delta=Delta(**_fields(a, "delta")) if {*letters} & {*"Ggh"} else None,
    )


def _flash_attention_2(a: Arguments, fp8: Fp8Recipe | None) -> float:
    """The weight of FlashAttention 2, according to a job's attention backend and its fp8 recipe.

    Some published recipes with delayed scaling used FlashAttention 2 on H100, and others used cuDNN 9. So if a job with
    delayed scaling does not choose a backend, its kernels are unknown. Published runs imply a weight of 0.25 to 0.8.
    """
    backend = str(a.attention_backend).removeprefix("AttnBackend.")
    if backend == "auto" and fp8 is Fp8Recipe.DELAYED:
        return 0.5
    return float(backend == "flash")


def _wide_gradients(a: Arguments) -> bool:
    if a.accumulate_allreduce_grads_in_fp32:
        return True
    if a.bf16:
        return not (a.grad_reduce_in_bf16 or _bytes_of(a, "main_grads_dtype") < 4)
    return not a.fp16


_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_BYTES |= {"torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2, "torch.uint8": 1}  # as Megatron parses them


def _bytes_of(a: Arguments, name: str) -> int:
    return _BYTES[str(getattr(a, name))]


def _states(a: Arguments, fp8: Fp8Recipe | None) -> tuple[int, bool]:
    """`Job.kept_states` and `Job.takes_gradients`.

    The states are both moments and, for a 16-bit parameter, its fp32 copy. Transformer Engine stores only 16 bits of a
    bf16 parameter's copy, because the parameter itself holds the other 16. With an fp8 recipe other than delayed
    scaling, Megatron keeps the full fp32 copy instead, and converts gradients to fp32.
    """
    if not a.use_precision_aware_optimizer:
        return 0, False
    parameters = _bytes_of(a, "main_params_dtype")
    takes = parameters < 4 or fp8 in (None, Fp8Recipe.DELAYED)
    if takes and a.bf16 and not a.fp8_param_gather:
        parameters = 2
    elif not (a.bf16 or a.fp16):
        parameters = 0
    return _bytes_of(a, "exp_avg_dtype") + _bytes_of(a, "exp_avg_sq_dtype") + parameters, takes


_LETTERS, _MOST_LAYERS = {ord("0"): "d", ord("1"): "t", ord(","): None}, 10_000


def expert_layers(frequency: Any, layers: int) -> tuple[bool, ...]:
    """Whether each of the model's `layers` has experts, as `--moe-layer-freq` says.

    `frequency` is a number N (every N-th layer has experts, starting with the first) or a list (1 for each layer with
    experts, 0 for each layer without), also as a text such as "([0]*3+[1]*58)". Raises UserError for anything else.
    """
    text = "".join(str(frequency).split())
    if text.isdecimal() and int(text):
        return tuple(index % int(text) == 0 for index in range(layers))
    # The text becomes a pattern of the letters d (without experts) and t (with), in which `(...)*N` is repeated.
    found = re.sub(r"\[([01](?:,[01])*),?\]", lambda each: f"({each[1].translate(_LETTERS)})", text).replace("+", "")
    while len(found) <= _MOST_LAYERS and (repeated := re.search(r"\(([dt]*)\)(?:\*(\d{1,4}))?", found)):
        found = found[: repeated.start()] + repeated[1] * int(repeated[2] or 1) + found[repeated.end() :]
    if not re.fullmatch("[dt]+", found):
        raise UserError(
            f'moe_layer_freq {frequency!r} cannot be read: give a number, or a list of 0 and 1 such as "([0]*3+[1]*58)"'
        )
    if len(found) != layers:
        raise UserError(
            f"moe_layer_freq lists {len(found)} layers, but the model has {layers}: give one number per layer"
        )
    return tuple(each == "t" for each in found)


_DELTAS = ("gated_delta_net", "gdn", "gdn2")


def _letters(a: Arguments, layers: int, experts: int) -> str:
    """`ModelShape.pattern` of a GPT model: empty if all its layers are alike, with attention and, if any, experts."""
    with_experts = expert_layers(a.moe_layer_freq, layers) if experts else (True,) * layers
    linear: Sequence[bool] = (False,) * layers
    if a.experimental_attention_variant in _DELTAS:
        each = a.linear_attention_freq
        whole = isinstance(each, int)
        linear = [(place + 1) % each > 0 for place in range(layers)] if whole else expert_layers(each, layers)
    letters = "".join("dthg"[2 * delta + own] for delta, own in zip(linear, with_experts, strict=True))
    return "" if set(letters) == {"t"} else letters


def _windowed(a: Arguments) -> float:
    """Fraction of layers with a window: 1 - 1/n with `--window-attn-skip-freq n`, and 1 without this option. If the
    option is a list, all layers are counted as layers without a window.
    """
    skipped = str(a.window_attn_skip_freq or 0)
    if not skipped.isdigit():
        return 0.0
    return 1 - 1 / int(skipped) if int(skipped) else 1.0


def modules_in(arguments: Mapping[str, Any], name: str, used: bool | None = True) -> frozenset[str]:
    """The parts of a layer that an option such as `--recompute-modules` lists, if it is `used`. A single name may be
    given as well.
    """
    if not used:
        return frozenset()
    given = arguments.get(name)
    if given is None:
        return frozenset({"core_attn"} if name == "recompute_modules" else ())  # Megatron's defaults
    return frozenset([given] if isinstance(given, str) else given)


def _glu_intermediates(a: Arguments, kind: LayerKind, experts: bool) -> int:
    """The number of intermediate tensors that a gated MLP keeps.

    Fused SwiGLU keeps no intermediates, because it recomputes them from its input. Megatron's unfused code keeps two:
    the activated gate, and the linear half plus an offset. Quick GeGLU is fused only in experts with biases. Its
    unfused code keeps a third tensor, the sigmoid.
    """
    if a.quick_geglu:
        fused = not a.no_bias_gelu_fusion and a.bias_gelu_fusion is not False
        if kind is LayerKind.ENGINE and experts and _biases(a) and fused:
            return 0 if a.activation_func_clamp_value is None else 2  # both halves, clamped
        return 3
    unfused = kind is not LayerKind.ENGINE or a.no_bias_swiglu_fusion or a.bias_swiglu_fusion is False
    return 2 if a.swiglu and unfused else 0


def _biases(a: Arguments) -> bool:
    return not a.disable_bias_linear and a.add_bias_linear is not False


def _fp8(a: Arguments, layers: int, pipeline: int) -> tuple[Fp8Recipe | None, int, int]:
    """The fp8 or fp4 recipe, and the numbers of layers at the model's start and end that stay in 16 bits."""
    if a.fp4_format or a.fp4:  # Megatron stores `--fp4-format` as `fp4`, and `--fp8-format` as `fp8`.
        asked = a.fp4_recipe
    elif a.fp8_format or a.fp8:
        asked = a.fp8_recipe
    else:
        return None, 0, 0
    if asked not in list(Fp8Recipe):
        raise UserError(f"the costs of fp8_recipe {asked!r} are unknown; use one of {', '.join(Fp8Recipe)}")
    if not a.first_last_layers_bf16:
        return Fp8Recipe(asked), 0, 0
    if asked == Fp8Recipe.DELAYED:
        raise UserError(
            "first_last_layers_bf16 cannot be combined with fp8_recipe delayed, the default; use another recipe"
        )
    ends = []
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count, most = getattr(a, name), layers // pipeline
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
            raise UserError(f"{name} is {count!r}: give a whole number from 0 to {most}, the number of layers per rank")
        ends.append(count)
    at_start, at_end = ends
    return Fp8Recipe(asked), at_start, at_end
