"""What the passes of this job are ordered for: predicted times. Training then runs the order that `plan` simulates."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_vp.cost.prediction.stage_costs import order_costs
from megatron_vp.errors import UserError
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import RunSettings
from megatron_vp.schedule import Costs


def choose_order(args: argparse.Namespace, settings: RunSettings, prediction: Prediction) -> Costs | None:
    """The costs for the layers and rows that `args` have, which are not validated yet.

    None where nothing is to be ordered, and for a job of which the cost model does not know all sizes: FLOPs stand in
    for times there (`training/pass_costs.py`).
    """
    if not settings.replaces_schedule or settings.family.fixed is not None:
        return None
    try:
        job, plan, hardware = prediction.job()
        ran = replace(plan, layers=layers_given(args) or plan.layers, vocab_rows=args.vocab_rows)
        return order_costs(job, ran, hardware)
    except UserError:  # said where it matters: by `choose_rows`, or by Megatron's own checks
        return None
