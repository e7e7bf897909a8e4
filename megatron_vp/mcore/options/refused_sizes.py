"""Refusals of jobs whose ranks, batch or layers cannot be divided equally, and of options that need or exclude others.

The jobs are checked before Megatron validates the arguments. Megatron would refuse most of them too, but without naming
the options.
"""

from __future__ import annotations

import argparse

from megatron_vp.errors import Reasons, UserError
from megatron_vp.jobs.division import TWO_BATCHES, UNEVEN_BATCH, UNEVEN_LAYERS, UNEVEN_RANKS
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.jobs.virtual_stages import shifts_given
from megatron_vp.mcore.options.refusal import Refusal


def _evenly_cut(a: argparse.Namespace) -> bool:
    """Whether Megatron gives every chunk the same number of layers."""
    return a.pipeline_model_parallel_layout is None and pattern_in(vars(a)) is None and not shifts_given(vars(a))


def _tensor(a: argparse.Namespace) -> int:
    """The number of ranks over which each weight is sharded, which can exceed the tensor-parallel size."""
    return a.tensor_parallel_num_weight_shards or a.tensor_model_parallel_size


def _replica(a: argparse.Namespace) -> int:
    """The number of ranks in one replica of the model."""
    return _tensor(a) * a.pipeline_model_parallel_size * a.context_parallel_size


def _samples(a: argparse.Namespace) -> int:
    """The number of samples in one microbatch, summed over all replicas."""
    return a.micro_batch_size * (a.world_size // _replica(a))


def _stages(a: argparse.Namespace) -> int:
    return a.pipeline_model_parallel_size * (a.num_virtual_stages_per_pipeline_rank or 1)


SIZE_REFUSALS = (
    Refusal(lambda a: a.world_size % _replica(a), UNEVEN_RANKS),
    Refusal(lambda a: a.step_batch_size_schedule and a.global_batch_size, TWO_BATCHES),
    Refusal(
        lambda a: (
            a.world_size % _replica(a) == 0
            and a.global_batch_size
            and a.micro_batch_size
            and a.global_batch_size % _samples(a)
            # Megatron can reduce the batch size of training, but not that of evaluation.
            and not (a.decrease_batch_size_if_needed and a.eval_global_batch_size)
        ),
        UNEVEN_BATCH,
    ),
    Refusal(lambda a: a.num_layers and _evenly_cut(a) and a.num_layers % _stages(a), UNEVEN_LAYERS),
    Refusal(
        lambda a: a.save and a.save_interval is None,
        "--save {save} needs --save-interval: set it to the number of iterations between two checkpoints, or leave "
        "--save out",
    ),
    Refusal(
        lambda a: a.mock_data and a.data_path,
        "--mock-data replaces neither the job's data_path nor its tokenizer: leave --mock-data out, or add --config "
        "data/mock, which replaces both",
    ),
)


def refuse_sizes(args: argparse.Namespace) -> None:
    """Raise one UserError with all refusals in SIZE_REFUSALS that apply to `args`, if there are any."""
    reasons, replicas = Reasons(), args.world_size // _replica(args)
    found = {
        **vars(args),
        "tensor_model_parallel_size": _tensor(args),
        "replica_ranks": _replica(args),
        "replicas": replicas,
        "samples": replicas * (args.micro_batch_size or 1),
        "stages": _stages(args),
    }
    for refusal in SIZE_REFUSALS:
        with reasons.collected():
            if refusal.applies(args):
                raise UserError(refusal.message.format_map(found))
    reasons.refuse()
