"""Warns at startup about options that do not have their intended effect."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vp.mcore.settled import run_settings, words


@dataclass(frozen=True)
class Ignored:
    """An option of Megatron that does not have its intended effect if `asked(args)`. why: the reason. does: its actual
    effect. because_of: the option that causes this; None if the cause is our schedule or its vocabulary passes.
    """

    option: str
    asked: Callable[[argparse.Namespace], Any]
    why: str
    does: str = "has no effect"
    because_of: str | None = None


IGNORED = (
    Ignored(
        "--cross-entropy-loss-fusion",
        lambda a: a.vocab_parallel and a.cross_entropy_loss_fusion,
        "passes S and T have a softmax of their own, with statistics in fp32",
    ),
    Ignored(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        lambda a: run_settings(a).replaces_schedule and a.microbatch_group_size_per_vp_stage is not None,
        "the order of passes follows from their costs",
    ),
    Ignored(
        "--overlap-p2p-communication-warmup-flush",
        lambda a: run_settings(a).replaces_schedule and a.overlap_p2p_comm_warmup_flush,
        "messages between stages run at the same time as the passes throughout the schedule",
    ),
    Ignored(
        "--use-ring-exchange-p2p",
        lambda a: run_settings(a).replaces_schedule and a.use_ring_exchange_p2p,
        "every edge of the pipeline has a communicator of its own",
    ),
    Ignored(
        "--pipeline-model-parallel-comm-backend",
        lambda a: run_settings(a).replaces_schedule and a.pipeline_model_parallel_comm_backend is not None,
        "the pipeline's communicators are of --distributed-backend",
    ),
    Ignored(
        "--no-overlap-p2p-communication",
        lambda a: (
            run_settings(a).replaces_schedule
            and a.virtual_pipeline_model_parallel_size is not None
            and not a.overlap_p2p_comm
        ),
        "messages between stages always run at the same time as the passes",
    ),
    Ignored(
        "--high-priority-stream-groups pp",
        lambda a: run_settings(a).replaces_schedule and "pp" in a.high_priority_stream_groups,
        "the pipeline's communicators have streams of high priority anyway",
    ),
    Ignored(
        "--defer-embedding-wgrad-compute",
        # `settle` has switched the option off in the arguments, so look for it on the command line.
        lambda a: run_settings(a).replaces_schedule and "defer_embedding_wgrad_compute" in words().options,
        "the schedule decides when weight gradients are computed; with --vocab-parallel that of the output layer is "
        "pass T, which fills waits",
    ),
    Ignored(
        "--save-activations-interval or --save-dgrads-interval for the output layer",
        lambda a: a.vocab_parallel and (a.save_activations_interval or a.save_dgrads_interval),
        "hooks on Megatron's own layers save these tensors, and shards are not such layers",
    ),
    Ignored(
        "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split",
        lambda a: (
            a.vocab_parallel and (a.account_for_embedding_in_pipeline_split or a.account_for_loss_in_pipeline_split)
        ),
        "every rank has its part of the vocabulary layers, and a stage with fewer layers waits for the others; leave "
        "it out, or say with --pipeline-model-parallel-layout which stage holds what",
        does="unbalances the stages",
    ),
    Ignored(
        "--moe-grouped-gemm",
        lambda a: a.moe_grouped_gemm and a.transformer_impl == "local",
        "Megatron's local layers run one expert after the other",
        because_of="--transformer-impl local",
    ),
)


def warn_of_ignored(args: argparse.Namespace) -> None:
    """Warn on rank 0 about every option in validated Megatron arguments that does not have its intended effect."""
    for ignored in IGNORED:
        if args.rank == 0 and ignored.asked(args):
            ours = f"--pipeline-schedule {args.pipeline_schedule}{' and --vocab-parallel' * args.vocab_parallel}"
            warnings.warn(
                f"{ignored.option} {ignored.does} with {ignored.because_of or ours}: {ignored.why}", stacklevel=2
            )
