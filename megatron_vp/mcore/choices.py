"""What a job's arguments choose: its schedule's family, and what follows from that."""

from __future__ import annotations

import argparse

from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.schedule import DEFAULT_SCHEDULE, Costs, Family, VocabMethod, family

ALGORITHMS = tuple(method.value for method in VocabMethod if method.is_sharded)


engine_in_shapes = False
"""Whether this is a replay of shapes in which local layers stand for Transformer Engine's."""


replayed: JobConfig | None = None
"""The whole job of which a replay plays one rank, before the replay's changes to it."""


order: Costs | None = None
"""What the passes of this job are ordered for; None: for FLOPs. All ranks of a run take rank 0's."""


def counts_engine() -> bool:
    """Whether local layers keep what Transformer Engine's would."""
    return engine_in_shapes


def chosen_family(args: argparse.Namespace) -> Family:
    """The record of --pipeline-schedule. Raises UserError for a name that is none, and a file that cannot be used."""
    try:
        return family(args.pipeline_schedule)
    except UserError as error:
        raise UserError(f"--pipeline-schedule: {error}") from None


def replaces_schedule(args: argparse.Namespace) -> bool:
    """Whether the plug-in runs the pipeline. Without either option Megatron does, virtual stages included."""
    return args.vocab_parallel or args.pipeline_schedule != DEFAULT_SCHEDULE


def splits_backward(args: argparse.Namespace) -> bool:
    """Whether some weight gradients are computed in passes of their own."""
    return chosen_family(args).splits_backward


def places_chunks(args: argparse.Namespace) -> bool:
    """Whether chunks are placed otherwise than by Megatron, whose chunk c of rank r is stage c p + r."""
    return not chosen_family(args).in_rounds


def ends_elsewhere(args: argparse.Namespace) -> bool:
    """Whether the last stage is on another rank than p-1."""
    return not chosen_family(args).ends_on_last_rank
