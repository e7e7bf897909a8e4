"""What can be chosen on the command line, and what a choice means."""

from __future__ import annotations

import argparse

from megatron_vp.schedule import V_SHAPED_SCHEDULES

ALGORITHMS = ("vocab-1", "vocab-2")
SPLIT_SCHEDULES = ("zb-h1", *V_SHAPED_SCHEDULES)


def replaces_schedule(args: argparse.Namespace) -> bool:
    """Whether the plug-in runs the pipeline; plain `1f1b` is Megatron's own schedule, virtual stages included."""
    return args.vocab_parallel or args.pipeline_schedule != "1f1b"
