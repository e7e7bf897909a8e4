"""Converts Megatron's arguments, named as in its parsed namespace, to the sizes from which costs are computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_vp.cost.sizes.expert_layers import expert_layers
from megatron_vp.cost.sizes.shapes import (
    AttentionKernels,
    CrossEntropy,
    Dispatcher,
    Fp8Recipe,
    Job,
    Latent,
    ModelShape,
    OptimizerStates,
    Recompute,
)
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.division import TWO_BATCHES, UNEVEN_BATCH, UNEVEN_RANKS, last_batch
from megatron_vp.jobs.layer_kind import LayerKind, layer_kind
from megatron_vp.jobs.layout_text import stages_behind_mtp
from megatron_vp.jobs.pattern_text import pattern_in

_REQUIRED = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"), ""),
    **{"num_layers": "hybrid_layer_pattern", "vocab_size": "padded_vocab_size"},
}
"""The sizes without a default, each with the argument that replaces it."""


def job_of(arguments: Mapping[str, Any], ranks: int | None = None) -> Job:
    """The job that `arguments` describe on `ranks` ranks. Missing optional arguments have Megatron's defaults.

    If `ranks` is None, the job has the smallest number of replicas that can hold the experts. Raises UserError if a
    size is missing or if sizes contradict each other.
    """

    def given(name: str, default: Any = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    def size(name: str) -> int:
        value = given(name)
        if value is None:
            absent = [each for each, other in _REQUIRED.items() if given(each) is None and given(other) is None]
            raise UserError(_missing(absent))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} is {value!r}: give a whole number of at least 1")
        return value

    pipeline, tensor = given("pipeline_model_parallel_size", 1), given("tensor_model_parallel_size", 1)
    hidden, gated = size("hidden_size"), bool(given("swiglu") or given("quick_geglu"))
    # Megatron's default for `ffn_hidden_size` is 4 h; with SwiGLU, it is 8/3 h, rounded down to a multiple of 64.
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if given("swiglu") else 4 * hidden
    rows = given("make_vocab_size_divisible_by", 128) * tensor
    padded = given("padded_vocab_size")
    if padded and padded < given("vocab_size", 0):
        raise UserError(
            f"padded_vocab_size {padded} is smaller than vocab_size {given('vocab_size')}: give at least vocab_size, "
            "or leave padded_vocab_size out"
        )
    if given("bf16") and given("fp16"):
        raise UserError(
            "bf16 and fp16 are both on, but a model can use only one of them: leave one out, or set it to false"
        )
    experts, pattern = given("num_experts", 0), pattern_in(arguments)
    if pattern is not None and "E" not in pattern.letters:
        experts = 0
    elif pattern is not None and not experts:
        raise UserError("--hybrid-layer-pattern has experts (E), but their number is missing: add --num-experts")
    dense_ffn = given("ffn_hidden_size", ffn)
    layers = size("num_layers") if pattern is None else len(pattern.letters)
    letters = _letters(given, layers, bool(experts)) if pattern is None else pattern.letters
    latent = _latent(given)
    model = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=size("num_attention_heads"),
        ffn=given("moe_ffn_hidden_size", dense_ffn) if experts else dense_ffn,
        vocab=padded or math.ceil(size("vocab_size") / rows) * rows,
        kv_groups=given("num_query_groups", 1) if given("group_query_attention") else 0,
        head_size=given("kv_channels", 0) if latent is None else given("qk_head_dim", 128) + latent.rotary,
        gated=gated,
        tied=not given("untie_embeddings_and_output_weights"),
        dropout=bool(given("hidden_dropout", 0.1)),
        experts=experts,
        experts_per_token=given("moe_router_topk", 2) if experts else 0,
        # In latent attention, both options are for norms of the compressed tensors, which are counted separately.
        query_key_norms=bool(given("qk_layernorm") or given("qk_l2_norm")) and latent is None,
        rotary=given("position_embedding_type") == "rope" or latent is not None,
        pattern=letters,
        dense_ffn=dense_ffn if experts and letters else 0,
        shared_ffn=given("moe_shared_expert_intermediate_size", 0) if experts else 0,
        latent=latent,
        mtp_heads=(letters[-1:] or "t",) * given("mtp_num_layers", 0) if pattern is None else pattern.heads,
        behind_mtp=stages_behind_mtp(str(given("pipeline_model_parallel_layout", ""))),
        window=_window(given),
        windowed=_windowed(given),
        clamped=given("activation_func_clamp_value") is not None,
        expert_biases=_biases(given),
    )
    recompute = given("recompute_granularity")
    if recompute not in (None, "full", "selective"):
        raise UserError(f"recompute_granularity {recompute!r} is unknown; use full or selective")
    modules = recompute_modules(arguments)
    fp8, bf16_at_start, bf16_at_end = _fp8(given, model.layers, pipeline)
    kind = layer_kind(arguments)
    context, micro_batch = given("context_parallel_size", 1), size("micro_batch_size")
    replica = pipeline * tensor * context
    holders = given("expert_model_parallel_size", 1) * given("expert_tensor_parallel_size", tensor)
    data = max(1, holders // (tensor * context)) if ranks is None else ranks // replica
    if not data or (ranks or replica) % replica:
        sizes = {"pipeline_model_parallel_size": pipeline, "tensor_model_parallel_size": tensor}
        sizes |= {"context_parallel_size": context}
        raise UserError(UNEVEN_RANKS.format(world_size=ranks, replica_ranks=replica, **sizes))
    batch, growing = given("global_batch_size", micro_batch * data), given("step_batch_size_schedule")
    if growing is not None:
        if given("global_batch_size") is not None:
            raise UserError(TWO_BATCHES)
        batch = last_batch(growing)
    if batch % (micro_batch * data):
        batches = {"global_batch_size": batch, "micro_batch_size": micro_batch}
        raise UserError(UNEVEN_BATCH.format(replicas=data, samples=micro_batch * data, **batches))
    return Job(
        model,
        sequence=size("seq_length"),
        micro_batch=micro_batch,
        microbatches=batch // (micro_batch * data),
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        data=data,
        expert=given("expert_model_parallel_size", 1),
        sequence_parallel=bool(given("sequence_parallel")),
        distributed_optimizer=bool(given("use_distributed_optimizer")),
        recompute=Recompute.FULL if recompute == "full" else Recompute.NONE,
        recompute_modules=modules if recompute == "selective" else frozenset(),
        wide_gradients=_wide_gradients(given),
        element_bytes=2 if given("bf16") or given("fp16") else 4,
        fp8=fp8,
        bf16_at_start=bf16_at_start,
        bf16_at_end=bf16_at_end,
        cross_entropy=_cross_entropy(given),
        layers=kind,
        data_overlap=bool(given("overlap_grad_reduce")),
        gather_overlap=bool(given("overlap_param_gather")),
        tensor_overlap=bool(given("tp_comm_overlap")),
        expert_overlap=bool(given("overlap_moe_expert_parallel_comm")),
        expert_tensor=given("expert_tensor_parallel_size", 0),
        dispatcher=_DISPATCHERS.get(given("moe_token_dispatcher_type"), Dispatcher.UNSAID),
        attention=_attention(given, fp8),
        fp8_parameters=bool(given("fp8_param_gather")),
        glu_intermediates=_glu_intermediates(given, kind, bool(experts)),
        attention_dropout=bool(given("attention_dropout", 0.1)),
        wide_softmax=bool(given("attention_softmax_in_fp32") or given("apply_query_key_layer_scaling")),
        states=_states(given, fp8),
    )


_DISPATCHERS = {"alltoall": Dispatcher.ALL_TO_ALL, "flex": Dispatcher.FLEXIBLE}
"""Dispatchers by the value of `--moe-token-dispatcher-type`. Megatron's default, `allgather`, becomes
`Dispatcher.UNSAID`, because recipes with experts do not use `allgather`.
"""


def _attention(given: Callable[..., Any], fp8: Fp8Recipe | None) -> AttentionKernels:
    """The attention kernels that a job uses, according to its backend and its fp8 recipe.

    Some published recipes with delayed scaling used FlashAttention 2 on H100, and others used cuDNN 9. So if a job with
    delayed scaling does not choose a backend, its kernels are unknown.
    """
    backend = str(given("attention_backend", "auto")).removeprefix("AttnBackend.")
    if backend == "flash":
        return AttentionKernels.FLASH_2
    unsaid = backend == "auto" and fp8 is Fp8Recipe.DELAYED
    return AttentionKernels.EITHER if unsaid else AttentionKernels.NEWEST


def _wide_gradients(given: Callable[..., Any]) -> bool:
    if given("accumulate_allreduce_grads_in_fp32"):
        return True
    if given("bf16"):
        return not (given("grad_reduce_in_bf16") or _bytes_of(given, "main_grads_dtype") < 4)
    return not given("fp16")


_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_RESOLVED = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
"""Maps the dtypes in Megatron's parsed arguments to the names in `_BYTES`."""


def _bytes_of(given: Callable[..., Any], name: str) -> int:
    asked = str(given(name, "fp32"))
    asked = _RESOLVED.get(asked, asked)
    if asked not in _BYTES:
        raise UserError(f"{name} {asked!r} is unknown; use one of {', '.join(_BYTES)}")
    return _BYTES[asked]


def _states(given: Callable[..., Any], fp8: Fp8Recipe | None) -> OptimizerStates | None:
    """The states of the precision-aware optimizer; None if the job does not use it.

    The states are both moments and, for a 16-bit parameter, its fp32 copy. Transformer Engine stores only 16 bits of a
    bf16 parameter's copy, because the parameter itself holds the other 16. With an fp8 recipe other than delayed
    scaling, Megatron keeps the full fp32 copy instead, and converts gradients to fp32.
    """
    if not given("use_precision_aware_optimizer"):
        return None
    parameters = _bytes_of(given, "main_params_dtype")
    takes = parameters < 4 or fp8 in (None, Fp8Recipe.DELAYED)
    if takes and given("bf16") and not given("fp8_param_gather"):
        parameters = 2
    elif not (given("bf16") or given("fp16")):
        parameters = 0
    return OptimizerStates(_bytes_of(given, "exp_avg_dtype") + _bytes_of(given, "exp_avg_sq_dtype") + parameters, takes)


def _missing(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is missing: set it in the configuration or as {option_of(names[0])}"
    return (
        f"{', '.join(names)} are missing: give a configuration, as in `megatron-vp plan llama3_8b [FLAGS]`, or flags "
        f"such as {option_of(names[0])} N"
    )


def _letters(given: Callable[..., Any], layers: int, experts: bool) -> str:
    """A GPT model's `ModelShape.pattern`: empty if the model has no experts, or if all its layers have experts."""
    with_experts = expert_layers(given("moe_layer_freq", 1), layers) if experts else ()
    return "" if all(with_experts) else "".join("t" if each else "d" for each in with_experts)


def _latent(given: Callable[..., Any]) -> Latent | None:
    """Sizes of multi-latent attention, with Megatron's defaults; None if the job does not use it."""
    if not given("multi_latent_attention"):
        return None
    ranks = given("q_lora_rank", 0), given("kv_lora_rank", 32)
    return Latent(*ranks, given("qk_pos_emb_head_dim", 64), given("v_head_dim", 128))


def _window(given: Callable[..., Any]) -> int:
    """Window size in tokens, including the token itself; 0 if attention has no window or an unlimited one."""
    before = re.search(r"-?\d+", str(given("window_size", "")))
    return max(0, int(before[0]) + 1) if before else 0


def _windowed(given: Callable[..., Any]) -> float:
    """Fraction of layers with a window: 1 - 1/n with `--window-attn-skip-freq n`, and 1 without this option. If the
    option is a list, all layers are counted as layers without a window.
    """
    skipped = str(given("window_attn_skip_freq", 0))
    if not _window(given) or not skipped.isdigit():
        return 0.0
    return 1 - 1 / int(skipped) if int(skipped) else 1.0


def recompute_modules(arguments: Mapping[str, Any]) -> frozenset[str]:
    """The parts of a layer that selective recomputation recomputes. Megatron's `--recompute-modules` may be given as a
    list or as a single name.
    """
    given = arguments.get("recompute_modules")
    if given is None:
        return frozenset({"core_attn"})  # Megatron's default
    return frozenset([given] if isinstance(given, str) else given)


def _glu_intermediates(given: Callable[..., Any], kind: LayerKind, experts: bool) -> int:
    """The number of intermediate tensors that a gated MLP keeps.

    Fused SwiGLU keeps no intermediates, because it recomputes them from its input. Megatron's unfused code keeps two:
    the activated gate, and the linear half plus an offset. Quick GeGLU is fused only in experts with biases. Its
    unfused code keeps a third tensor, the sigmoid.
    """
    if given("quick_geglu"):
        fused = not given("no_bias_gelu_fusion") and given("bias_gelu_fusion") is not False
        if kind is LayerKind.ENGINE and experts and _biases(given) and fused:
            return 0 if given("activation_func_clamp_value") is None else 2  # both halves, clamped
        return 3
    unfused = kind is not LayerKind.ENGINE or given("no_bias_swiglu_fusion") or given("bias_swiglu_fusion") is False
    return 2 if given("swiglu") and unfused else 0


def _biases(given: Callable[..., Any]) -> bool:
    return not given("disable_bias_linear") and given("add_bias_linear") is not False


def _cross_entropy(given: Callable[..., Any]) -> CrossEntropy:
    if not given("cross_entropy_loss_fusion"):
        return CrossEntropy.EAGER
    asked = given("cross_entropy_fusion_impl", CrossEntropy.NATIVE.value)
    if asked not in ("native", "te"):
        raise UserError(f"cross_entropy_fusion_impl {asked!r} is unknown; use native or te")
    return CrossEntropy(asked)


def _fp8(given: Callable[..., Any], layers: int, pipeline: int) -> tuple[Fp8Recipe | None, int, int]:
    """The fp8 recipe, and the numbers of layers at the model's start and end that stay in 16 bits."""
    fp8_format = given("fp8_format", given("fp8"))  # Megatron stores `--fp8-format` as `fp8`
    if fp8_format is None:
        return None, 0, 0
    if fp8_format not in ("e4m3", "hybrid"):
        raise UserError(f"fp8_format {fp8_format!r} is unknown; use e4m3 or hybrid")
    asked = given("fp8_recipe", Fp8Recipe.DELAYED.value)
    if asked not in list(Fp8Recipe):
        raise UserError(f"the costs of fp8_recipe {asked!r} are unknown; use one of {', '.join(Fp8Recipe)}")
    if not given("first_last_layers_bf16"):
        return Fp8Recipe(asked), 0, 0
    if asked == Fp8Recipe.DELAYED:
        raise UserError(
            "first_last_layers_bf16 cannot be combined with fp8_recipe delayed, the default; use another recipe"
        )
    ends = []
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count, most = given(name, 1), layers // pipeline
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
            raise UserError(f"{name} is {count!r}: give a whole number from 0 to {most}, the number of layers per rank")
        ends.append(count)
    at_start, at_end = ends
    return Fp8Recipe(asked), at_start, at_end
