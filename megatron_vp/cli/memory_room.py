"""Reports a run's free memory, and suggests how to free more if this memory is less than the prediction's error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_vp.cost.hardware.constants import ERROR_BAND

if TYPE_CHECKING:
    from megatron_vp.cli.planning import Request
    from megatron_vp.cost.planning.evaluation import Evaluation

GIB = 2**30


def memory_room(
    request: Request, found: Evaluation, others: Sequence[Evaluation] = (), searched: bool = False
) -> list[str]:
    """Lines that state a run's free memory and, if this memory is less than the prediction's error, how to free more.

    The list is empty if the run does not fit in memory.

    `others`: runs of the same job, fastest first. `searched`: whether other parallel sizes have already been tried.
    """
    limit, job = request.limit, request.job
    if not found.fits(limit):
        return []
    line = (
        f"memory of the fullest rank: {found.peak_memory / GIB:.1f} of {limit / GIB:.4g} GiB, "
        f"{(limit - found.peak_memory) / GIB:.1f} GiB free"
    )
    if not found.is_tight(limit):
        return [line]
    ways = ["a run in the table above that needs less memory"] if searched else []
    offered = (each for each in others if not each.is_tight(limit) and each.candidate.method != "interlaced")
    roomy = next(offered, None)
    if roomy is not None:
        plan, slower = roomy.candidate.plan, roomy.iteration_seconds / found.iteration_seconds - 1
        ways.append(
            f"{plan.label} with {roomy.candidate.method} ({roomy.peak_memory / GIB:.1f} GiB, "
            f"{100 * slower:+.1f} % iteration time)"
        )
    if job.recompute.value == "none":
        ways.append("recomputation (--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)")
    less = ", so that each rank holds less optimizer state"
    ways.append(f"more nodes (--nodes){less if job.distributed_optimizer else ' with --use-distributed-optimizer'}")
    if not searched:
        ways.append("different parallel sizes (megatron-vp plan --search)")
    return [
        f"{line}; predicted memory may be {100 * ERROR_BAND['memory']:.0f} % too low, so the run may not fit",
        f"to free memory: {'; '.join(ways)}",
    ]
