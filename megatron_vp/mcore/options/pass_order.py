"""What the passes of this job are ordered for: predicted times. Training then runs the order that `plan` simulates."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_vp.cost.prediction.stage_costs import order_costs
from megatron_vp.errors import UserError
from megatron_vp.mcore import choices
from megatron_vp.mcore.choices import chosen_family, replaces_schedule
from megatron_vp.mcore.options.predicted_job import predicted_job
from megatron_vp.mcore.reports.job_partition import layers_given


def resolve_order(args: argparse.Namespace) -> None:
    """Set `choices.order` for the layers and rows that `args` have, which are not validated yet.

    It is None where nothing is to be ordered, and for a job of which the cost model does not know all sizes: FLOPs
    stand in for times there (`training/pass_costs.py`).
    """
    choices.order = None
    if not replaces_schedule(args) or chosen_family(args).fixed is not None:
        return
    try:
        job, plan, hardware = predicted_job(args)
        ran = replace(plan, layers=layers_given(args) or plan.layers, vocab_rows=args.vocab_rows)
        choices.order = order_costs(job, ran, hardware)
    except UserError:  # said where it matters: by `resolve_rows`, or by Megatron's own checks
        return
