"""How many chunks to offload where that is left open, and whether the nodes have the memory that they take."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.offloading import with_chosen_offload
from megatron_vp.cost.prediction.copies import check_host_memory
from megatron_vp.cost.prediction.predict import predict
from megatron_vp.cost.prediction.samples import sampled
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.mcore.options.pass_order import predicted_plan
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.settled import RunSettings, replay
from megatron_vp.schedule.request import AUTO


def chosen_offload(args: argparse.Namespace) -> str:
    """--offload-chunks, of auto the number that the cost model chooses. Raises UserError where no number fits, and for
    a job that it does not count.
    """
    if args.offload_chunks != AUTO:
        return args.offload_chunks
    job, plan, hardware = Prediction(args).job()
    config = JobConfig({"offload_chunks": AUTO}, {})
    return str(with_chosen_offload(config, plan, sampled(job), _on_this_node(hardware)).offload_chunks)


def check_host_room(args: argparse.Namespace, settings: RunSettings, prediction: Prediction) -> None:
    """Raise UserError where --offload-chunks needs more of a node's memory than there is, with the most that fits.

    A job that the cost model does not count is left to the allocation itself, as are a schedule in a file and the one
    rank of a replay.
    """
    if not settings.offloads or settings.family.fixed is not None or replay().job is not None:
        return
    try:
        job, plan, hardware = predicted_plan(args, settings, prediction)
        found = predict(sampled(job), plan, _on_this_node(hardware))
    except UserError:
        return
    check_host_memory(found)


def _on_this_node(hardware: Hardware) -> Hardware:
    """With the ranks and the memory that this node has; as it is where a job for other nodes is checked."""
    if installed.of_nodes is not None:
        return hardware
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    return replace(hardware, gpus_per_node=ranks, host=replace(hardware.host, memory=memory))
