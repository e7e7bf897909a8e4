"""Predicts the pass times by which this job's passes are ordered, as `megatron-vp plan` does."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_vp.cost.prediction.limit import with_limit
from megatron_vp.cost.prediction.stage_costs import order_costs
from megatron_vp.errors import UserError
from megatron_vp.mcore.options.predicted_job import PredictedJob, Prediction
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import RunSettings
from megatron_vp.schedule import Costs
from megatron_vp.schedule.flex import shaped


def choose_order(args: argparse.Namespace, settings: RunSettings, prediction: Prediction) -> Costs | None:
    """Return the costs of passes for the layers and vocabulary rows in `args`, which need not be validated yet.

    Options that the cost model does not cover are ignored, because approximate costs are enough to order passes.
    Returns None if the job uses Megatron's own schedule or a schedule file, or if the cost model cannot predict the
    job. In the last case, all ranks use the default costs, `PassCosts()`.
    """
    if not settings.replaces_schedule or settings.family.fixed is not None:
        return None
    try:
        job, plan, hardware = predicted_plan(args, settings, prediction)
        return order_costs(job, plan, hardware)
    except UserError:  # If the error matters, `choose_rows` or one of Megatron's own checks reports it.
        return None


def predicted_plan(args: argparse.Namespace, settings: RunSettings, prediction: Prediction) -> PredictedJob:
    """Return the cost model's inputs for the layers and vocabulary rows in `args`. Raises UserError if the cost model
    cannot predict the job.
    """
    job, plan, hardware = prediction.job()
    layers = layers_given(args) or plan.layers
    plan = replace(plan, layers=layers, vocab_rows=args.vocab_rows, shape=settings.family.shape)
    return PredictedJob(job, plan, hardware)


def fit_schedule(
    args: argparse.Namespace, settings: RunSettings, prediction: Prediction, order: Costs | None
) -> RunSettings:
    """Search for a schedule within --activation-limit, store its building block (`Shape`) in `args`, and return the
    settings with this block.

    Only this function searches; all schedules that are generated later use the block that it found. Raises UserError
    for a limit that no schedule meets, and for a job whose sizes are unknown.
    """
    if args.activation_limit is None:
        return settings
    if not settings.family.bases:
        raise UserError(
            f"--activation-limit {args.activation_limit} with --pipeline-schedule {args.pipeline_schedule} has no "
            "effect, because the memory of that schedule is fixed: use --pipeline-schedule v-flex, or leave "
            "--activation-limit out"
        )
    job, plan, hardware = predicted_plan(args, settings, prediction)
    shape = with_limit(job, plan, hardware, args.activation_limit, order).shape
    args.schedule_shape = shape
    return replace(settings, family=shaped(settings.family, shape))
