"""Describes this job to the cost model, before Megatron has validated the arguments."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron_vp.cost.hardware.gpus import HARDWARE, Hardware
from megatron_vp.cost.sizes.job_plan import plan_of, uncounted
from megatron_vp.cost.sizes.job_sizes import job_of
from megatron_vp.cost.sizes.shapes import Job, Plan
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import SIZES, JobConfig, read_job_config
from megatron_vp.jobs.settings import ONE_QUEUE
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.settled import Words, replay, words
from megatron_vp.mcore.storage.dataset import padded_vocabulary

UNKNOWN_GPU = "h100"
"""The GPU that the cost model assumes if it does not know the actual GPU. The order of passes depends only on the
ratios of pass times, which differ little between GPUs.
"""


class PredictedJob(NamedTuple):
    """The cost model's inputs for one job."""

    job: Job
    plan: Plan
    """The plan that the user's arguments describe. `predicted_plan` adds the plug-in's choice of layers and vocabulary
    rows.
    """
    hardware: Hardware


class Prediction:
    """Turns a job's arguments into the cost model's inputs. The arguments are parsed, but need not be validated yet.

    `typed`: the command line from which the arguments were parsed; by default, the command line of this process.
    """

    def __init__(self, args: argparse.Namespace, typed: Words | None = None) -> None:
        self._args, self._words = args, typed or words()

    @cached_property
    def vocabulary(self) -> int | None:
        """The padded vocabulary size; None if unknown. Cached, because reading a large tokenizer takes seconds."""
        return padded_vocabulary(self._args)

    @property
    def uncounted(self) -> list[str]:
        """The job's options whose effect on time or memory the cost model ignores. Raises UserError as `job` does."""
        return uncounted(self._config())

    def job(self) -> PredictedJob:
        """Return the job's sizes and plan, and this rank's hardware. Options in `uncounted` are ignored, and so is fp8
        on hardware without it, where layers compute in 16 bits.

        Raises UserError for a job whose sizes are unknown or invalid.
        """
        config = self._config()
        job = replace(job_of(config.values, self._args.world_size), one_queue=os.environ.get(ONE_QUEUE) == "1")
        hardware = _hardware(self._args)
        if hardware.rates is None or not hardware.rates.fp8_gemm:
            job = replace(job, fp8=None)
        return PredictedJob(job, plan_of(config), hardware)

    def _config(self) -> JobConfig:
        """Read the job's configuration as the commands do, but take its sizes from Megatron's arguments, because a
        checkpoint may have replaced the sizes given on the command line. Raises UserError.

        A replay uses the configuration of the whole job, so that the replayed rank gets the same rows and order of
        passes as in the job.
        """
        args = self._args
        if self.vocabulary is None:
            raise UserError("the vocabulary size is unknown until the tokenizer can be read")
        sizes: dict[str, Any] = {"padded_vocab_size": self.vocabulary}
        given = replay().job
        if given is None:
            given = read_job_config([], self._words.all)
            sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None} | sizes
            if args.step_batch_size_schedule is not None:
                sizes.pop("global_batch_size", None)  # Megatron sets it to one microbatch per replica.
            sizes["offload_chunks"] = args.offload_chunks  # This number may have replaced `auto`.
        return JobConfig(given.values | sizes, given.origins | dict.fromkeys(sizes, "the job's"))


def _hardware(args: argparse.Namespace) -> Hardware:
    """Return the HARDWARE entry for this rank's device: a CPU core, the GPU that the device's name mentions, or
    UNKNOWN_GPU.
    """
    if installed.of_nodes is not None or replay().meter is not None:  # The job will run on another machine.
        return HARDWARE[UNKNOWN_GPU]
    # Do not ask torch here: during Megatron's startup on a CPU, torch reports that CUDA is available.
    if uses_cpu([]) or args.distributed_backend == "gloo":
        return HARDWARE["cpu"]
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(args.local_rank % torch.cuda.device_count()).lower())
    return next((entry for name, entry in HARDWARE.items() if name in words), HARDWARE[UNKNOWN_GPU])
