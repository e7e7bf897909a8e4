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
    """A Megatron option that does not have its intended effect if `asked(args)` is true.

    why: why the option does not have this effect.
    does: what the option does instead.
    because_of: the other option that prevents the effect; None if our schedule or passes prevent it.
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
        "passes S and T compute their own softmax, with statistics in fp32",
    ),
    Ignored(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        lambda a: run_settings(a).replaces_schedule and a.microbatch_group_size_per_vp_stage is not None,
        "the plug-in derives the order of passes from their predicted times",
    ),
    Ignored(
        "--overlap-p2p-communication-warmup-flush",
        lambda a: run_settings(a).replaces_schedule and a.overlap_p2p_comm_warmup_flush,
        "messages between stages overlap with the passes throughout the schedule",
    ),
    Ignored(
        "--use-ring-exchange-p2p",
        lambda a: run_settings(a).replaces_schedule and a.use_ring_exchange_p2p,
        "every pair of neighbouring ranks has its own communicators",
    ),
    Ignored(
        "--pipeline-model-parallel-comm-backend",
        lambda a: run_settings(a).replaces_schedule and a.pipeline_model_parallel_comm_backend is not None,
        "the pipeline's communicators use the backend that --distributed-backend selects",
    ),
    Ignored(
        "--no-overlap-p2p-communication",
        lambda a: (
            run_settings(a).replaces_schedule
            and a.virtual_pipeline_model_parallel_size is not None
            and not a.overlap_p2p_comm
        ),
        "messages between stages always overlap with the passes",
    ),
    Ignored(
        "--high-priority-stream-groups pp",
        lambda a: run_settings(a).replaces_schedule and "pp" in a.high_priority_stream_groups,
        "the pipeline's communicators always use high-priority streams",
    ),
    Ignored(
        "--defer-embedding-wgrad-compute",
        # `settle` has switched the option off in the arguments, so look for it on the command line.
        lambda a: run_settings(a).replaces_schedule and "defer_embedding_wgrad_compute" in words().options,
        "the schedule decides when weight gradients are computed; with --vocab-parallel, pass T computes the output "
        "layer's weight gradient in otherwise idle time",
    ),
    Ignored(
        "--save-activations-interval or --save-dgrads-interval for the output layer",
        lambda a: a.vocab_parallel and (a.save_activations_interval or a.save_dgrads_interval),
        "Megatron saves activations and gradients through hooks on its own output layer, which --vocab-parallel "
        "replaces with shards",
    ),
    Ignored(
        "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split",
        lambda a: (
            a.vocab_parallel and (a.account_for_embedding_in_pipeline_split or a.account_for_loss_in_pipeline_split)
        ),
        "every rank holds a shard of the vocabulary layers, so a stage with fewer layers waits for the others; leave "
        "the option out, or assign the layers to stages with --pipeline-model-parallel-layout",
        does="unbalances the stages",
    ),
    Ignored(
        "--moe-grouped-gemm",
        lambda a: a.moe_grouped_gemm and a.transformer_impl == "local",
        "Megatron's local layers compute one expert after another",
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
