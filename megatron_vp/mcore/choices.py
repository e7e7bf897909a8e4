"""What can be chosen on the command line, and what a choice means."""

from __future__ import annotations

import argparse

ALGORITHMS = ("vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "interlaced")
V_SHAPED_SCHEDULES = ("zb-v", "v-half", "v-min")
SPLIT_SCHEDULES = ("zb-h1", *V_SHAPED_SCHEDULES)


def replaces_schedule(args: argparse.Namespace) -> bool:
    """Whether the plug-in runs the pipeline; plain `1f1b` is Megatron's own schedule, virtual stages included."""
    return args.vocab_parallel or args.pipeline_schedule != "1f1b"
