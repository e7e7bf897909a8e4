"""Describes this job to the cost model, and predicts the pass times by which its passes are ordered."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_vp.cost.hardware.gpus import HARDWARE, Hardware
from megatron_vp.cost.layers.fp8 import rate_of
from megatron_vp.cost.layers.job_plan import plan_of, uncounted
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.offloading import with_limit
from megatron_vp.cost.planning.stage_costs import order_costs
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import ONE_QUEUE, read_job_config
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import RunSettings, Words, process
from megatron_vp.mcore.storage.dataset import padded_vocabulary
from megatron_vp.schedule import Costs
from megatron_vp.schedule.flex import shaped

UNKNOWN_GPU = "h100"
"""The GPU that the cost model assumes if it does not know the actual GPU. The order of passes depends only on the
ratios of pass times, which differ little between GPUs.
"""


class PredictedJob(NamedTuple):
    """The cost model's inputs for one job."""

    job: Job
    plan: Plan
    hardware: Hardware


class Prediction:
    """The cost model's inputs for the job that parsed arguments ask for.

    args: `SettledJob.given`, into which neither the plug-in nor Megatron writes.
    typed: the words from which they were parsed; by default, those of this process.

    A replay has the inputs of the whole job, so that the replayed rank gets the same rows and order of passes.
    """

    def __init__(self, args: Arguments, typed: Words | None = None) -> None:
        self._args = args
        self._words = (typed or process.words).all

    @cached_property
    def vocabulary(self) -> int | None:
        """The padded vocabulary size; None if unknown. Cached, because reading a large tokenizer takes seconds."""
        return padded_vocabulary(self._args)

    @property
    def uncounted(self) -> list[str]:
        """The job's options whose effect on time or memory the cost model ignores."""
        return uncounted(process.replayed or read_job_config([], self._words))

    def job(self) -> PredictedJob:
        """Return the job's sizes, the plan that the arguments describe, and this rank's hardware. Options in
        `uncounted` are ignored, and so is fp8 or fp4 on hardware without it, where layers compute in 16 bits.

        Raises UserError for a job whose sizes are unknown or invalid.
        """
        if self.vocabulary is None:
            raise UserError("the vocabulary size is unknown until the tokenizer can be read")
        known = {"padded_vocab_size": self.vocabulary, "vocab_parallel": self._args.vocab_parallel}
        asked = (process.replayed or vars(self._args)) | known
        if asked.get("vocab_parallel") is not True:
            asked["vocab_parallel_algorithm"] = None
        job = replace(job_of(asked, self._args.world_size), one_queue=os.environ.get(ONE_QUEUE) == "1")
        hardware = _hardware(self._args)
        if job.fp8 and not rate_of(job.fp8, hardware):
            job = replace(job, fp8=None)
        return PredictedJob(job, plan_of(asked), hardware)

    def planned(self, args: Arguments, settings: RunSettings) -> PredictedJob:
        """As `job`, with the layers, vocabulary rows and schedule that the plug-in chose, which are in `args`."""
        job, plan, hardware = self.job()
        layers = layers_given(args) or plan.layers
        plan = replace(plan, layers=layers, vocab_rows=args.vocab_rows, shape=settings.family.shape)
        return PredictedJob(job, plan, hardware)


def _hardware(args: Arguments) -> Hardware:
    """Return the HARDWARE entry for this rank's device: a CPU core, the GPU that the device's name mentions, or
    UNKNOWN_GPU.
    """
    if installed.of_nodes is not None or process.meter is not None:  # The job will run on another machine.
        return HARDWARE[UNKNOWN_GPU]
    # Do not ask torch here: during Megatron's startup on a CPU, torch reports that CUDA is available.
    if uses_cpu([]) or args.distributed_backend == "gloo":
        return HARDWARE["cpu"]
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(args.local_rank % torch.cuda.device_count()).lower())
    return next((entry for name, entry in HARDWARE.items() if name in words), HARDWARE[UNKNOWN_GPU])


def choose_order(args: Arguments, settings: RunSettings, prediction: Prediction) -> Costs | None:
    """Return the costs of passes for the layers and vocabulary rows in `args`, which need not be validated yet.

    Options that the cost model does not cover are ignored, because approximate costs are enough to order passes.
    Returns None if the job uses Megatron's own schedule or a schedule file, or if the cost model cannot predict the
    job. In the last case, all ranks use the default costs, `PassCosts()`.
    """
    if not settings.replaces_schedule or settings.family.fixed is not None:
        return None
    try:
        job, plan, hardware = prediction.planned(args, settings)
        return order_costs(job, plan, hardware)
    except UserError:  # If the error matters, `choose_rows` or one of Megatron's own checks reports it.
        return None


def fit_schedule(args: Arguments, settings: RunSettings, prediction: Prediction, order: Costs | None) -> RunSettings:
    """Search for a schedule within --activation-limit, and return the settings with its building block (`Shape`).

    Only this function searches; all schedules that are generated later use the block that it found. Raises UserError
    for a limit that no schedule meets, and for a job whose sizes are unknown.
    """
    if not settings.family.bases:
        raise UserError(
            f"--activation-limit {args.activation_limit} with --pipeline-schedule {args.pipeline_schedule} has no "
            "effect, because the memory of that schedule is fixed: use --pipeline-schedule v-flex, or leave "
            "--activation-limit out"
        )
    job, plan, hardware = prediction.planned(args, settings)
    shape = with_limit(job, plan, hardware, args.activation_limit, order).shape
    return replace(settings, family=shaped(settings.family, shape))
