"""Run the code of post-training packages against plain Megatron, on CPU processes, and compare what it computes.

Give folders with checkouts, from which the packages can be imported; the packages' own dependencies are not needed:

    python benchmarks/post_training.py slime=FOLDER nemo_rl=FOLDER verl=FOLDER megatron_rl=FOLDER

For each package, its own functions run a forward-only call and a training call, first with plain Megatron and whole
logits, then with our schedules. A line gives the largest differences of log-probabilities and entropies, of reports,
and of gradients, each relative to the tensor's largest entry. For megatron_rl, put its folder into PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from itertools import starmap
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.harness.ranks import process_group, run_ranks
from tests.mcore import own_loop, token_loop
from tests.mcore.own_loop import SEQUENCE, VOCAB

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE, TWO = ({"vocab_parallel": True, "vocab_parallel_algorithm": f"vocab-{index}"} for index in (1, 2))
SHARDS = {2: "24,16", 4: "8,16,0,16"}
CASES = [
    # Pipeline ranks, chunks of a rank, settings, factor of the entropies in the loss, context-parallel ranks.
    (2, 1, TWO, 0.0, 1),
    (2, 2, ONE | {"pipeline_schedule": "v-half"}, 0.5, 1),
    (2, 1, {"pipeline_schedule": "zb-h1"}, 0.5, 1),
    (4, 1, TWO | {"pipeline_schedule": "zb-h1"}, 0.0, 1),
    (4, 1, ONE, 0.5, 1),
    (2, 1, ONE | {"core_attention": "sdpa"}, 0.5, 2),
    (2, 2, TWO | {"pipeline_schedule": "v-half", "core_attention": "sdpa"}, 0.0, 2),
]
ABSENT = {
    "slime": "ray sglang psutil pybase64 httpx flash_attn",
    "nemo_rl": "ray tensordict einops zmq pynvml uvicorn fastapi hydra megatron.bridge nemo_rl.models.generation "
    "nemo_rl.models.policy nemo_rl.utils.logger",
    "verl": "ray tensordict hydra codetiming pybase64 einops torchdata datasets orjson",
    "megatron_rl": "megatron.rl.agent megatron.rl.inference megatron.rl.server tensorboard torch.utils.tensorboard",
}
BOUND = 2e-6

PACKS = [[0, 1], [2], [3, 4, 5], [6]]
"""Samples of each microbatch."""
TOTALS, RESPONSES = [20, 31, 12, 40, 9, 17, 26], [9, 20, 5, 21, 4, 9, 11]
"""Tokens of each sample and of its response."""
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that contain whatever is asked of them, in place of dependencies that these runs do not use."""

    def __init__(self, names: str) -> None:
        self._names = tuple(names.split())

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of an absent module; None for other modules."""
        if any(name == each or name.startswith(f"{each}.") for each in self._names):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Return the module."""
        module = ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name)


def run(
    rank: int, world: int, package: str, folder: str, settings: dict | None, chunks: int, bonus: float, context: int
) -> Any:
    """Return the gradients of a training call by global name, the values of a forward-only call, and the reports."""
    sys.path[:0] = [folder, str(EXAMPLES)]
    own_loop.start = partial(own_loop.start, context=context)
    import megatron_vp
    from megatron_vp.mcore import patch_table, patches

    with process_group(rank, world):
        if settings is None:
            patches.apply(patch_table.patches_of("cpu platform"))
        elif package != "slime":
            megatron_vp.enable(**settings)
        sys.meta_path.insert(0, Absent(ABSENT[package]))
        return globals()[package](world // context, chunks, settings, bonus)


def started(world: int, chunks: int, **options: Any) -> list[Any]:
    """Return the chunks of a model with rotary embeddings and an attention that knows packed sequences. Seed the data
    that follow.
    """
    from megatron_vp.mcore.model.attention import ScaledDotProductAttention

    def layers() -> Any:
        spec = local()
        spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
        return spec

    local, own_loop.get_gpt_layer_local_spec = own_loop.get_gpt_layer_local_spec, layers
    own_loop.TransformerConfig = partial(own_loop.TransformerConfig, apply_rope_fusion=False, **options)
    own_loop.GPTModel = partial(own_loop.GPTModel, position_embedding_type="rope")
    parts = own_loop.start(world, chunks)
    torch.manual_seed(5)
    return parts


def called(parts: list[Any], forward_step: Any, batches: list[Any]) -> Any:
    """Return what `run` returns, after a forward-only call and a training call."""
    given = {"num_microbatches": len(batches), "seq_length": SEQUENCE, "micro_batch_size": 1}
    given |= {"forward_step_func": forward_step, "model": parts if len(parts) > 1 else parts[0]}

    def call(forward_only: bool) -> Any:
        data = [iter(batches) for _ in parts]
        call = own_loop.get_forward_backward_func()
        return call(**given, data_iterator=data if len(parts) > 1 else data[0], forward_only=forward_only)

    with torch.no_grad():
        told = call(True)
    reports = [each["loss"] for each in call(False)]
    return token_loop.gradients(parts), [value for each in told for value in each["values"]], reports


def policy_loss(bonus: float, output: Any) -> Any:
    """Return a policy gradient's loss on log-probabilities (and entropies, in a dictionary), and its report."""
    values = list(output.values()) if isinstance(output, dict) else [output]
    values = [each.values() if each.is_nested else each for each in values]
    advantages = torch.linspace(-0.2, 1, values[0].numel()).view(values[0].shape)
    loss = -(advantages * torch.exp(values[0] + 4).clamp(max=1.2)).mean()
    if bonus:
        loss = loss - bonus * values[1].mean()
    kept = [each.detach().numpy().copy() for each in values]
    return loss, {"loss": loss.detach().clone(), "values": kept}


def whole_logits(hidden: Any, weight: Any, labels: Any, temperature: float, _reduction: str, _group: Any) -> Any:
    """Return log-probabilities and entropies [s] of one sequence from its whole logits, as verl's kernels do."""
    log_softmax = torch.log_softmax(hidden[:, 0] @ weight.t() / temperature, -1)
    return log_softmax.gather(-1, labels.view(-1, 1))[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def slime(world: int, chunks: int, settings: dict | None, bonus: float) -> Any:
    """slime's `forward_only` and `train_one_step`, on packs of different lengths."""
    from slime.backends.megatron_utils import cp_utils, data, loss, model

    no = (
        "allgather_cp use_dynamic_batch_size enable_mtp_training ci_test calculate_per_token_loss use_opsm use_tis "
        "eps_clip_c "
        "recompute_loss_function use_rollout_logprobs get_mismatch_metrics use_unbiased_kl decoder_seq_length "
        "custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path save_debug_train_data"
    )
    args = Namespace(
        rollout_temperature=0.7,
        entropy_coef=bonus,
        rollout_top_p=1.0,
        data_pad_size_multiplier=8,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        log_probs_chunk_size=-1,
        check_for_nan_in_loss_and_grad=True,
        use_rollout_entropy=True,
        loss_type="policy_loss",
        advantage_estimator="grpo",
        eps_clip=0.2,
        eps_clip_high=0.2,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        kl_loss_coef=0.1,
        **dict.fromkeys(no.split()),
    )
    if settings is not None:
        import slime_tokens

        slime_tokens.SETTINGS = settings
        slime_tokens.init(args)
    parts = started(world, chunks, **VARIABLE)
    old, reference, advantages = (
        [cp_utils.slice_log_prob_with_cp(torch.randn(r), t, r) for t, r in zip(TOTALS, RESPONSES, strict=True)]
        for _ in range(3)
    )
    rollout = {
        "tokens": [torch.randint(VOCAB, (length,)) for length in TOTALS],
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in RESPONSES],
        "log_probs": [each.abs() * -0.1 - 4 for each in old],
        "ref_log_probs": [each.abs() * -0.1 - 4 for each in reference],
        "advantages": advantages,
        "rollout_mask_sums": [torch.tensor(float(length)) for length in RESPONSES],
        "micro_batch_indices": PACKS,
    }
    found: dict[str, Any] = {}
    optimizer = mock.MagicMock()
    optimizer.step = lambda: (found.update(token_loop.gradients(parts)), (True, 0.0, 0))[1]
    iterators = data.get_data_iterator(rollout)
    cpu = mock.patch.multiple(data.accelerator, current_device=lambda: "cpu", device=lambda: "cpu")
    with cpu, mock.patch.object(model, "get_args", lambda: args):
        values = model.forward_only(loss.get_log_probs_and_entropy, args, parts, iterators, [len(PACKS)])
        for iterator in iterators:
            iterator.reset()
        reports, _ = model.train_one_step(
            args, 0, 0, iterators, parts, optimizer, mock.MagicMock(), len(PACKS), len(TOTALS)
        )
    return found, [each.numpy() for name in sorted(values) for each in values[name]], list(reports.values())


def verl(world: int, chunks: int, settings: dict | None, bonus: float) -> Any:
    """verl's fused forward on packs of different lengths, and a policy gradient with a bonus for entropy."""
    from verl.models.mcore import model_forward_fused as fused

    parts = started(world, chunks, **VARIABLE)
    for part in parts:
        fused.patch_fused_forward(part.module)
    if settings is None:
        fused.linear_cross_entropy = whole_logits
    samples = [torch.randint(VOCAB, (length,)) for length in TOTALS]
    batches = [torch.nested.nested_tensor([samples[i] for i in pack], layout=torch.jagged) for pack in PACKS]
    forward = fused.fused_forward_model_engine()

    def forward_step(iterator: Any, model: Any) -> Any:
        ids = next(iterator)
        output = forward(model, ids, ids, {}, 0.7, calculate_entropy=True, pad_token_id=0)
        return output, partial(policy_loss, bonus)

    return called(parts, forward_step, batches)


def nemo_rl(world: int, chunks: int, settings: dict | None, bonus: float) -> Any:
    """NeMo-RL's `megatron_forward_backward` with its fused log-probabilities, against its unfused ones."""
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.model_utils import patch_gpt_model_forward_for_linear_ce_fusion
    from nemo_rl.models.megatron import data, train

    # Our schedules must not take the stand-in for Megatron-Bridge for one.
    sys.meta_path.pop(0)
    for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
        del sys.modules[name]
    fused = settings is not None
    if fused:
        patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=16)
    parts, batches = started(world, chunks), []
    for _ in PACKS:
        ids = torch.randint(VOCAB, (2, SEQUENCE))
        rows = {
            f"{name}_logprobs": -4 - 0.1 * torch.rand(2, SEQUENCE)
            for name in ("prev", "generation", "reference_policy")
        }
        masks = {"token_mask": (torch.rand(2, SEQUENCE) < 0.7).float(), "sample_mask": torch.ones(2)}
        batch = BatchedDataDict(input_ids=ids, advantages=torch.randn(2, SEQUENCE), **rows, **masks)
        places = torch.arange(SEQUENCE).expand(2, SEQUENCE)
        batches.append(data.ProcessedMicrobatch(batch, ids, ids, None, places, None, None))
    cfg = {"sequence_packing": {"enabled": False}}
    loss = ClippedPGLossFn(ClippedPGLossConfig(), use_fused_linear_logprobs=fused)
    last = parts if chunks > 1 else parts[0]
    given = {"num_microbatches": len(PACKS), "seq_length": SEQUENCE, "mbs": 2, "use_fused_linear_logprobs": fused}
    data_of = lambda: [iter(batches) for _ in parts] if chunks > 1 else iter(batches)  # noqa: E731
    score = train.LogprobsPostProcessor(cfg, use_fused_linear_logprobs=fused)
    with torch.no_grad():
        told = train.megatron_forward_backward(last, data_of(), post_processing_fn=score, forward_only=True, **given)
    valid = {"global_valid_seqs": torch.tensor(8.0), "global_valid_toks": torch.tensor(300.0)}
    learn = train.LossPostProcessor(loss, cfg, num_microbatches=len(PACKS))
    reports = train.megatron_forward_backward(last, data_of(), post_processing_fn=learn, **given, **valid)
    values = [each["logprobs"].numpy() for each in told]
    return token_loop.gradients(parts), values, [each["loss"] for each in reports]


def megatron_rl(world: int, chunks: int, settings: dict | None, bonus: float) -> Any:
    """Megatron-RL's `get_logprobs`, which takes its values from the model's answer instead of logits."""
    from megatron.rl import rl_utils

    from megatron_vp import TokenOutputs, TokenRequest, token_log_probs

    rl_utils.get_args = lambda: Namespace(fp16=False, bf16=False)
    rl_utils.get_nvtx_range = lambda: lambda *_, **__: nullcontext()
    if settings is not None:
        rl_utils.selective_log_softmax = lambda answer, index: answer[..., 0]
    parts = started(world, chunks)
    asked = {"output_processor": token_log_probs, "output_processor_context": TokenRequest()}

    class Asking:
        """A model whose answer has the shape [b, s, 1]."""

        def __init__(self, model: Any) -> None:
            self._model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self._model, name)

        def __call__(self, tokens: Any, *rest: Any, **given: Any) -> Any:
            if settings is None:
                del given["fp32_output"]  # This argument is of Megatron's wrapper for half precision.
                return self._model(tokens, *rest, **given)
            output = self._model(tokens, *rest, labels=tokens.roll(-1, 1), **given, **asked)
            return output.log_probs[..., None] if isinstance(output, TokenOutputs) else output

    def forward_step(iterator: Any, model: Any) -> Any:
        ids = next(iterator)
        return rl_utils.get_logprobs(Asking(model), ids, torch.arange(SEQUENCE)[None]), partial(policy_loss, 0.0)

    return called(parts, forward_step, [torch.randint(VOCAB, (1, SEQUENCE)) for _ in PACKS])


def main() -> int:
    """Run the packages whose folders are given."""
    folders = dict(each.split("=", 1) for each in sys.argv[1:])
    if not folders or not folders.keys() <= ABSENT.keys():
        print(f"nothing was run: give checkouts as {' '.join(f'{name}=FOLDER' for name in ABSENT)}")
        return 0
    worst = 0.0
    for package, folder in folders.items():
        plain: dict[Any, Any] = {}
        for ranks, chunks, settings, bonus, context in CASES:
            if package == "megatron_rl" and chunks > 1:  # Megatron-RL takes every chunk of the last rank for the last.
                continue
            if context > 1 and package != "slime":
                continue
            case = ranks, bonus, context
            if case not in plain:
                plain[case] = merged(package, folder, None, ranks, 1, bonus, context)
            if "vocab_parallel" in settings:
                settings |= {"vocab_shards": SHARDS[ranks]}
            found: dict[str, float] = {}
            for ours, whole in zip(
                merged(package, folder, settings, ranks, chunks, bonus, context), plain[case], strict=True
            ):
                for name, distances in (
                    ("values", starmap(apart, zip(ours[1][0], whole[1][0], strict=True))),
                    ("reports", [apart(np.array(ours[1][1]), np.array(whole[1][1]))]),
                    ("gradients", (apart(value, whole[0][name]) for name, value in ours[0].items())),
                ):
                    found[name] = max(found.get(name, 0.0), *distances)
            worst = max(worst, *found.values())
            told = (f"{name} {value:.1e}" for name, value in found.items())
            print(package, f"p {ranks}", *[f"c {context}"] * (context > 1), settings, *told, flush=True)
    return int(worst > BOUND)


def merged(
    package: str, folder: str, settings: dict | None, ranks: int, chunks: int, bonus: float, context: int
) -> list[Any]:
    """Return what `run` found on the pipeline ranks of each context-parallel rank."""
    found = run_ranks(ranks * context, run, package, folder, settings, chunks, bonus, context)
    return [token_loop.merged(found[part::context]) for part in range(context)]


def apart(ours: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    largest = np.abs(expected).max(initial=1e-30)  # A context-parallel rank may have no token of a response.
    return float(np.abs(ours - expected).max(initial=0) / largest)


if __name__ == "__main__":
    sys.exit(main())
