"""Train a tiny model under the plug-in and keep everything that two runs can be compared by.

Weights are set by their global name (layers numbered over the whole model), so every layout starts from the same
model. Losses, gradient norms and every parameter's main gradient are recorded just before each optimizer step.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from tests.harness.ranks import run_ranks

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass
class Step:
    """One training step: mean loss, the microbatches' (sum of token losses, tokens), gradients by global name."""

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
    row_shards: bool = False

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


def train(
    world_size: int,
    arguments: Sequence[str],
    *,
    same_weights: bool = True,
    masked: bool = False,
    timeout: float = 120,
) -> Run:
    """Train on `world_size` ranks and merge what they recorded (data parallel rank 0; vocabulary rows in rank order).

    `same_weights` replaces the weights after the model is built; leave it off to keep Megatron's own or a checkpoint's.
    With tensor parallelism the recorded tensors are those of its first rank.
    `masked` leaves every third position, and one whole sequence of each microbatch, out of the loss.
    """
    options = {"same_weights": same_weights, "masked": masked}
    return _merge(run_ranks(world_size, train_case, list(arguments), **options, timeout=timeout))


def train_case(
    rank: int, world_size: int, arguments: list[str], *, same_weights: bool = True, masked: bool = False
) -> Run | None:
    """Runs inside a rank: the whole of `pretrain_gpt_vp.main`, watched. None but on the first data-parallel rank."""
    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    import pretrain_gpt_vp as script

    script.prepare()
    from megatron.core import mpu
    from megatron.training import get_args, training

    run = Run()
    reports: list[tuple[float, float]] = []
    chunks: list = []
    build, one_step, evaluate, loss_func = (
        training.setup_model_and_optimizer,
        training.train_step,
        training.evaluate,
        script.loss_func,
    )

    def setup(*args, **kwargs):
        model, optimizer, scheduler = build(*args, **kwargs)
        chunks[:] = model
        if same_weights:
            _set_weights(model)
            optimizer.reload_model_params()
        return model, optimizer, scheduler

    def train_step(forward_step, data_iterator, model, optimizer, *args, **kwargs):
        step = Step()
        update = optimizer.step

        def record_and_step():
            step.gradients = {name: _array(parameter.main_grad) for name, parameter in _named(model)}
            return update()

        reports.clear()
        with mock.patch.object(optimizer, "step", record_and_step):
            result = one_step(forward_step, data_iterator, model, optimizer, *args, **kwargs)
        step.loss = float(result[0]["lm loss"]) if result[0] else None
        step.grad_norm = float(result[5])
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
        mock.patch.object(training, "setup_model_and_optimizer", setup),
        mock.patch.object(training, "train_step", train_step),
        mock.patch.object(training, "evaluate", evaluate_),
        mock.patch.object(script, "loss_func", loss_function),
    ):
        try:
            script.main()
        except SystemExit as stop:  # --exit-interval ends a run this way after saving
            assert stop.code in (None, 0), stop.code
    run.row_shards = get_args().vocab_parallel
    run.parameters = {name: _array(parameter) for name, parameter in _named(chunks)}
    return run if mpu.get_data_parallel_rank() == 0 else None


def _array(tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy().copy()


def _named(model: list) -> Iterator[tuple[str, object]]:
    """Every parameter under a name that does not depend on where its layer sits; a tied head is the word embedding."""
    from megatron.core.utils import unwrap_model
    from megatron.training import get_args

    tied = not get_args().untie_embeddings_and_output_weights
    for chunk in map(unwrap_model, model):
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
            name = ".".join(parts)
            yield (WORD_EMBEDDING if tied and name == OUTPUT else name), parameter


def _set_weights(model: list) -> None:
    import torch
    from megatron.core import mpu
    from megatron.training import get_args

    args = get_args()
    assert args.tensor_model_parallel_size == 1, "weights are set for unsplit layers"
    group = mpu.get_pipeline_model_parallel_group()
    for name, parameter in _named(model):
        shape, rows = tuple(parameter.shape), slice(None)
        if name in (WORD_EMBEDDING, OUTPUT):
            shape = (args.padded_vocab_size, shape[1])
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = 0.05 * torch.randn(shape, generator=random)
        if "norm" in name and name.endswith("weight"):
            full += 1
        if args.vocab_parallel and name in (WORD_EMBEDDING, OUTPUT):
            counts = [None] * mpu.get_pipeline_model_parallel_world_size()
            torch.distributed.all_gather_object(counts, parameter.shape[0], group=group)
            start = sum(counts[: mpu.get_pipeline_model_parallel_rank()])
            rows = slice(start, start + parameter.shape[0])
        with torch.no_grad():
            parameter.copy_(full[rows])


def _merge(results: list[Run | None]) -> Run:
    runs = [run for run in results if run is not None]
    last = runs[-1]
    merged = Run(evaluations=last.evaluations, parameters=_join([run.parameters for run in runs], last.row_shards))
    for steps in zip(*(run.steps for run in runs), strict=True):
        step = Step(steps[-1].loss, steps[-1].microbatches, steps[-1].grad_norm)
        step.gradients = _join([each.gradients for each in steps], last.row_shards)
        merged.steps.append(step)
    merged.losses_on = [rank for rank, run in enumerate(runs) if run.steps and run.steps[0].loss is not None]
    return merged


def _join(parts: list[dict[str, np.ndarray]], row_shards: bool) -> dict[str, np.ndarray]:
    """One dictionary of whole tensors: vocabulary rows are stacked in rank order, everything else is taken once."""
    joined: dict[str, np.ndarray] = {}
    for part in parts:
        for name, array in part.items():
            if row_shards and name in (WORD_EMBEDDING, OUTPUT) and name in joined:
                joined[name] = np.concatenate([joined[name], array])
            else:
                joined.setdefault(name, array)
    return joined
