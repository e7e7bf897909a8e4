"""Chooses the number of chunks for `--offload-chunks auto`, and checks that nodes have enough host memory."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.offloading import check_offload, with_chosen_offload
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.planning.samples import sampled
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.settled import RunSettings, replay
from megatron_vp.schedule.request import AUTO

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


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
    gives the largest number of chunks that fits.

    Jobs with a schedule file, and jobs that the cost model does not cover completely are not checked. Of replays, only
    those on CPUs are checked: the kernel kills a process that needs more memory than is available.
    """
    replayed = replay().job is not None
    applies = uses_cpu([]) and replay().meter is None if replayed else settings.offloads
    if not applies or settings.family.fixed is not None:
        return
    try:
        if prediction.uncounted and not replayed:
            return
        job, plan, hardware = prediction.planned(args, settings)
        found = predict(sampled(job), plan, _on_this_node(hardware))
    except UserError:
        return
    if not replayed:
        return check_offload(found)
    # A check sets the rank to the number of ranks.
    place = min(args.rank * len(found.memory) // args.world_size, len(found.memory) - 1)
    needed, free = found.memory[place].total, _available()
    if needed > free:
        raise UserError(
            f"a replay of rank {args.rank} needs about {needed / 2**30:.3g} GiB of memory, but {free / 2**30:.3g} GiB "
            "are available: add --shapes-only, which counts memory without using it, or replay on a GPU"
        )


def _available() -> int:
    """Bytes of memory that a process can still allocate, on this machine and within a container's limit."""
    found = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    limits = [path.read_text().strip() for path in _LIMITS if path.exists()]
    return min([*(1024 * int(each) for each in found), *(int(each) for each in limits if each.isdecimal())])


def _on_this_node(hardware: Hardware) -> Hardware:
    """Return `hardware` with this node's number of ranks and its host memory per rank.

    If the job will run on other nodes, `hardware` is returned unchanged.
    """
    if installed.of_nodes is not None:
        return hardware
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    return replace(hardware, gpus_per_node=ranks, host=replace(hardware.host, memory=memory))
