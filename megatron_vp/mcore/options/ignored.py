"""Options that change nothing under our schedules: said once at the start, so that nobody tunes what has no effect."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vp.mcore.options.choices import replaces_schedule


@dataclass(frozen=True)
class Ignored:
    """An option of Megatron's, whether `asked(args)` asks for it where it has no effect, and why it has none."""

    option: str
    asked: Callable[[argparse.Namespace], Any]
    why: str


IGNORED = (
    Ignored(
        "--cross-entropy-loss-fusion",
        lambda a: a.vocab_parallel and a.cross_entropy_loss_fusion,
        "passes S and T have a softmax of their own, with statistics in fp32",
    ),
    Ignored(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        lambda a: replaces_schedule(a) and a.microbatch_group_size_per_vp_stage is not None,
        "the order of passes follows from their costs",
    ),
    Ignored(
        "--overlap-p2p-communication-warmup-flush",
        lambda a: replaces_schedule(a) and a.overlap_p2p_comm_warmup_flush,
        "receives are posted early throughout the schedule",
    ),
    Ignored(
        "--use-ring-exchange-p2p",
        lambda a: replaces_schedule(a) and a.use_ring_exchange_p2p,
        "every edge of the pipeline has a communicator of its own",
    ),
    Ignored(
        "--pipeline-model-parallel-comm-backend",
        lambda a: replaces_schedule(a) and a.pipeline_model_parallel_comm_backend is not None,
        "the pipeline's communicators are of --distributed-backend",
    ),
)


def warn_of_ignored(args: argparse.Namespace) -> None:
    """Warn, on rank 0, of every option that validated Megatron arguments ask for in vain."""
    for ignored in IGNORED:
        if args.rank == 0 and ignored.asked(args):
            warnings.warn(
                f"{ignored.option} has no effect with --pipeline-schedule {args.pipeline_schedule}"
                f"{' and --vocab-parallel' if args.vocab_parallel else ''}: {ignored.why}",
                stacklevel=2,
            )
