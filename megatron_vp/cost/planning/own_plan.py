"""The plan of the job as its configuration describes it, as training would run it."""

from __future__ import annotations

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.job_plan import plan_of
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.chosen_shards import with_shards
from megatron_vp.cost.planning.limit import with_given_limit
from megatron_vp.cost.planning.offloading import with_chosen_offload
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig


def own_plan(config: JobConfig, job: Job, hardware: Hardware, limit: float) -> Plan | None:
    """The plan with the layers, rows, offloaded chunks and shape that training would use; None if there is none."""
    try:
        plan = with_chosen_offload(config, plan_of(config), job, hardware, limit)
        return with_given_limit(config, with_shards(config, plan, job, hardware, limit), job, hardware)
    except UserError:
        return None
