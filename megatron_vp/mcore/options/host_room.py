"""Chooses the number of chunks for `--offload-chunks auto`, and checks that nodes have enough host memory."""

from __future__ import annotations

import os
from dataclasses import replace

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.offloading import check_offload, with_chosen_offload
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.planning.samples import sampled
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.settled import RunSettings, process
from megatron_vp.schedule.request import AUTO


def chosen_offload(args: Arguments) -> str:
    """Return the value of --offload-chunks, with `auto` replaced by the cost model's choice. Raises UserError if no
    number of offloaded chunks makes the job fit into memory, or if the cost model cannot predict the job.
    """
    if args.offload_chunks != AUTO:
        return args.offload_chunks
    job, plan, hardware = Prediction(args).job()
    return str(
        with_chosen_offload({"offload_chunks": AUTO}, plan, sampled(job), _on_this_node(hardware)).offload_chunks
    )


def check_host_room(args: Arguments, settings: RunSettings, prediction: Prediction) -> None:
    """Raise UserError if --offload-chunks moves nothing, or needs more host memory than a node has; then the message
    gives the largest number of chunks that fits. Jobs with a schedule file, and jobs that the cost model does not cover
    completely are not checked.
    """
    if process.replayed is not None or not settings.offloads or settings.family.fixed is not None:
        return
    try:
        if prediction.uncounted:
            return
        job, plan, hardware = prediction.planned(args, settings)
        found = predict(sampled(job), plan, _on_this_node(hardware))
    except UserError:
        return
    check_offload(found)


def _on_this_node(hardware: Hardware) -> Hardware:
    """Return `hardware` with this node's number of ranks and its host memory per rank.

    If the job will run on other nodes, `hardware` is returned unchanged.
    """
    if installed.of_nodes is not None:
        return hardware
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    return replace(hardware, gpus_per_node=ranks, host=replace(hardware.host, memory=memory))
