"""Train a tiny model with the plug-in, and record everything that comparisons of two runs need.

Weights are set by their global name (with layers numbered over the whole model), so every layout starts from the same
model. Losses, gradient norms and every parameter's main gradient are recorded just before each optimizer step.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from tests.harness.ranks import run_ranks

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass
class Step:
    """One training step: mean loss, the microbatches' (sum of token losses, tokens), gradients by global name.

    The loss is None where a step was skipped because gradients overflowed. Gradients are without the loss scale.
    """

    loss: float | None = None
    microbatches: list[tuple[float, float]] = field(default_factory=list)
    grad_norm: float = 0.0
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Run:
    """What a run left behind; on one rank, or merged over the ranks of one pipeline."""

    steps: list[Step] = field(default_factory=list)
    evaluations: list[list[tuple[float, float]]] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    losses_on: list[int] = field(default_factory=list)
    rows_on: list[int] = field(default_factory=list)
    """Of a merged run, how many rows of the word embedding each rank holds."""
    row_shards: bool = False
    pipeline_rank: int = 0
    pairs: list[list[str]] = field(default_factory=list)
    """Of each pair that ran as one (in a merged run, of all ranks), its layers' nodes in order: name, pass, stream."""
    split: dict[str, int] = field(default_factory=dict)
    """Of parameters that tensor ranks or vocabulary shards divide, the divided dimension."""

    @property
    def losses(self) -> list[float]:
        """Mean loss of every step."""
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of every step, before clipping."""
        return [step.grad_norm for step in self.steps]


def tiny_model(**changes: object) -> list[str]:
    """Arguments of a tiny GPT on mock data: 4 layers, h 32, s 16, V 512, fp32, no dropout, 3 steps of 4 microbatches.

    `changes` are long argument names with underscores: a value replaces, True is a bare flag, None or False leaves out.
    With `vocab_parallel` shards are even unless `vocab_shards` says otherwise.
    """
    arguments: dict[str, object] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 3,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 511,
        "make_vocab_size_divisible_by": 64,
        "eval_iters": 0,
        "eval_interval": 1000,
        "log_interval": 1,
        "num_workers": 0,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "untie_embeddings_and_output_weights": True,
        "distributed_timeout_minutes": 1,
        "vocab_shards": "even" if changes.get("vocab_parallel") else None,
        **changes,
    }
    words = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        option = "--" + name.replace("_", "-")
        words += (
            [option] if value is True else [option, *(map(str, value) if isinstance(value, list) else [str(value)])]
        )
    return words


def comparable_model(**changes: object) -> list[str]:
    """Arguments of a tiny GPT whose own rounding in fp32 stays at half of a bound of 1e-6; otherwise as `tiny_model`.

    Many tokens and few words: sums over 128 positions, dot products over 40 logits. Adam turns the rounding of small
    gradients into whole updates, and two plain runs that differ in the pipeline size alone drift apart, so the learning
    rate is small; it still moves every gradient by far more than the bound. 39 tokens and the end of document make 40
    rows, uneven on three ranks. Evaluation runs between the steps.
    """
    arguments = {
        "hidden_size": 64,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "vocab_size": 39,
        "make_vocab_size_divisible_by": 4,
        "lr": 1e-5,
        "eval_iters": 1,
        "eval_interval": 2,
    }
    return tiny_model(**arguments | changes)


def train(
    world_size: int,
    arguments: Sequence[str],
    *,
    same_weights: bool = True,
    masked: bool = False,
    hook: Callable[[list], list] | None = None,
    script: Any = None,
    timeout: float = 120,
) -> Run:
    """Train on `world_size` ranks and merge what they recorded (of one replica; divided tensors in rank order).

    `same_weights` replaces the weights after the model is built; leave it off to keep Megatron's own or a checkpoint's.
    `masked` leaves every third position, and one whole sequence of each microbatch, out of the loss.
    `hook` is given the finished chunks before Megatron wraps them, and returns them: one of `pre_wrap_hooks`.
    `script` is another script than `pretrain_gpt_vp`: an object with its functions `prepare`, `main` and `loss_func`.
    """
    options = {"same_weights": same_weights, "masked": masked, "hook": hook, "script": script}
    return _merge(run_ranks(world_size, train_case, list(arguments), **options, timeout=timeout))


def train_case(
    rank: int,
    world_size: int,
    arguments: list[str],
    *,
    same_weights: bool = True,
    masked: bool = False,
    hook: Callable[[list], list] | None = None,
    script: Any = None,
) -> Run | None:
    """Runs inside a rank: the whole of a script's `main`, watched. None on ranks that only repeat others."""
    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    script = script or importlib.import_module("pretrain_gpt_vp")
    script.prepare()
    from megatron.core import mpu
    from megatron.training import get_args, training

    from megatron_vp.runtime import offload

    run = Run()
    reports: list[tuple[float, float]] = []
    chunks: list = []
    build, one_step, evaluate, loss_func, model_config = (
        training.setup_model_and_optimizer,
        training.train_step,
        training.evaluate,
        script.loss_func,
        script.gpt_config_from_args,
    )

    def config_from_args(args):
        config = model_config(args)
        config.pre_wrap_hooks += [hook] if hook else []
        return config

    def setup(*args, **kwargs):
        model, optimizer, scheduler = build(*args, **kwargs)
        chunks[:] = model
        if same_weights:
            set_weights(model)
            optimizer.reload_model_params()
        return model, optimizer, scheduler

    def train_step(forward_step, data_iterator, model, optimizer, *args, **kwargs):
        step = Step()
        update = optimizer.step

        def record_and_step():
            if get_args().use_distributed_optimizer:
                _gather_gradients(model)
            scale = optimizer.get_loss_scale().item()
            trained = ((name, parameter) for name, parameter in _named(model) if parameter.requires_grad)
            step.gradients = {name: _array(parameter.main_grad) / scale for name, parameter in trained}
            return update()

        reports.clear()
        with mock.patch.object(optimizer, "step", record_and_step):
            result = one_step(forward_step, data_iterator, model, optimizer, *args, **kwargs)
        skipped = result[1]
        step.loss = float(result[0]["lm loss"]) if result[0] and not skipped else None
        step.grad_norm = float(result[5] or 0.0)  # None where the step was skipped
        step.microbatches = list(reports)
        run.steps.append(step)
        return result

    def evaluate_(*args, **kwargs):
        reports.clear()
        result = evaluate(*args, **kwargs)
        run.evaluations.append(list(reports))
        return result

    def loss_function(loss_mask, token_loss):
        if masked:
            loss_mask = loss_mask.clone()
            loss_mask[:, ::3] = 0
            loss_mask[0] = 0
        result = loss_func(loss_mask, token_loss)
        reports.append(tuple(result[2]["lm loss"].tolist()))
        return result

    with (
        mock.patch.object(offload, "LEAST_OFFLOADED", 0),  # what these small models save leaves the device, too
        mock.patch.object(training, "setup_model_and_optimizer", setup),
        mock.patch.object(training, "train_step", train_step),
        mock.patch.object(training, "evaluate", evaluate_),
        mock.patch.object(script, "loss_func", loss_function),
        mock.patch.object(script, "gpt_config_from_args", config_from_args),
        _pairs_recorded(run),
    ):
        try:
            script.main()
        except SystemExit as stop:  # --exit-interval ends a run this way after saving
            assert stop.code in (None, 0), stop.code
    run.row_shards = get_args().vocab_parallel
    run.pipeline_rank = mpu.get_pipeline_model_parallel_rank()
    run.parameters = {name: _array(parameter) for name, parameter in _named(chunks)}
    run.split = {name: parameter.partition_dim for name, parameter in _named(chunks) if _is_split(parameter)}
    if mpu.get_data_parallel_rank(with_context_parallel=True):
        # A replica of everything but its experts.
        experts = {name for name, parameter in _named(chunks) if not getattr(parameter, "allreduce", True)}
        for arrays in (run.parameters, run.split, *(step.gradients for step in run.steps)):
            for name in arrays.keys() - experts:
                del arrays[name]
    return run if mpu.get_expert_data_parallel_rank() == 0 else None


@contextmanager
def _pairs_recorded(run: Run) -> Iterator[None]:
    """Note what runs as one, and let it run in fp32, in which Megatron refuses it."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan as Plan
    from megatron.core.pipeline_parallel.utils import ScheduleNode, get_comm_stream
    from megatron.core.transformer import TransformerConfig

    run_plans, acquire, check = Plan.run, ScheduleNode.stream_acquire_context, TransformerConfig.__post_init__
    nodes: list[str] = []

    def plans_run(forward, backward, **kwargs):
        nodes.clear()
        output = run_plans(forward, backward, **kwargs)
        if forward and backward:
            run.pairs.append([node for node in nodes if "process" not in node or "mtp" in node])
        return output

    def acquired(node, name=None):
        nodes.append(f"{name} {'communication' if node.stream is get_comm_stream() else 'computation'}")
        return acquire(node, name)

    def checked(self):
        precisions = self.fp16, self.bf16
        if self.overlap_moe_expert_parallel_comm and not any(precisions):
            self.bf16 = True
        check(self)
        self.fp16, self.bf16 = precisions

    with (
        mock.patch.object(Plan, "run", staticmethod(plans_run)),
        mock.patch.object(ScheduleNode, "stream_acquire_context", acquired),
        mock.patch.object(TransformerConfig, "__post_init__", checked),
    ):
        yield


def _array(tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy().copy()


def _gather_gradients(model: list) -> None:
    """The distributed optimizer reduces to each rank its part of a bucket; fill in the others' parts."""
    import torch

    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group)


def _is_split(parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False)


def _named(model: list) -> Iterator[tuple[str, object]]:
    """Every parameter under a name that does not depend on where it sits; a tied head is the word embedding."""
    from megatron.core import mpu
    from megatron.core.utils import unwrap_model
    from megatron.training import get_args

    args = get_args()
    tied = not args.untie_embeddings_and_output_weights
    for chunk in map(unwrap_model, model):
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                first = mpu.get_expert_model_parallel_rank() * args.num_experts // args.expert_model_parallel_size
                parts[place] = str(first + int(parts[place]))
            name = ".".join(parts)
            yield (WORD_EMBEDDING if tied and name == OUTPUT else name), parameter


def set_weights(model: list) -> None:
    import torch
    from megatron.core import mpu
    from megatron.training import get_args

    args = get_args()
    group = mpu.get_model_parallel_group() if args.vocab_parallel else mpu.get_tensor_model_parallel_group()
    counts = [None] * group.size()
    own = {parameter.shape[0] for name, parameter in _named(model) if name in (WORD_EMBEDDING, OUTPUT)}
    torch.distributed.all_gather_object(counts, max(own, default=0), group=group)
    for name, parameter in _named(model):
        shape, part = list(parameter.shape), slice(None)
        dimension = parameter.partition_dim if _is_split(parameter) else 0
        if name in (WORD_EMBEDDING, OUTPUT):
            start = sum(counts[: group.rank()])
            shape[0], part = args.padded_vocab_size, slice(start, start + shape[0])
        elif _is_split(parameter):
            size = shape[dimension]
            start = size * mpu.get_tensor_model_parallel_rank()
            shape[dimension], part = size * mpu.get_tensor_model_parallel_world_size(), slice(start, start + size)
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = 0.05 * torch.randn(shape, generator=random)
        if "norm" in name and name.endswith("weight"):
            full += 1
        with torch.no_grad():
            parameter.copy_(full.movedim(dimension, 0)[part].movedim(0, dimension))


def _merge(results: list[Run | None]) -> Run:
    runs = [run for run in results if run is not None]
    last = runs[-1]
    merged = Run(evaluations=last.evaluations, parameters=_join(runs, [run.parameters for run in runs]))
    for steps in zip(*(run.steps for run in runs), strict=True):
        step = Step(steps[-1].loss, steps[-1].microbatches, steps[-1].grad_norm)
        step.gradients = _join(runs, [each.gradients for each in steps])
        merged.steps.append(step)
    merged.rows_on = [len(run.parameters.get(WORD_EMBEDDING, ())) for run in runs]
    merged.pairs = [pair for run in runs for pair in run.pairs]
    merged.losses_on = [rank for rank, run in enumerate(runs) if run.steps and run.steps[0].loss is not None]
    return merged


def _join(runs: list[Run], parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One dictionary of whole tensors: what ranks divide is joined in rank order, everything else is taken once."""
    pieces: dict[str, list[np.ndarray]] = {}
    stage: dict[str, int] = {}
    for run, part in zip(runs, parts, strict=True):
        for name, array in part.items():
            # Plain Megatron holds a tied weight on the first and on the last stage.
            if run.row_shards or run.pipeline_rank == stage.setdefault(name, run.pipeline_rank):
                pieces.setdefault(name, []).append(array)
    split = {name: dimension for run in runs for name, dimension in run.split.items()}
    return {
        name: np.concatenate(arrays, split[name]) if name in split else arrays[0] for name, arrays in pieces.items()
    }
