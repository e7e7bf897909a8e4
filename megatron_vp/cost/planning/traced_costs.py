"""Takes pass times from the trace of a run instead of modelling them."""

from __future__ import annotations

from pathlib import Path

from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.stage_costs import single_microbatch
from megatron_vp.errors import UserError
from megatron_vp.schedule import StageCosts
from megatron_vp.trace.figures import mean_costs
from megatron_vp.trace.rank_files import read_traces


def traced_costs(folder: Path, job: Job, plan: Plan) -> StageCosts:
    """Mean pass and collective times, in seconds, of the run that wrote its trace to `folder` with `--pipeline-trace`.

    Raises UserError if the folder holds no trace, or if the traced run differs from `job` and `plan` in schedule,
    vocabulary method or placement.
    """
    first, *_ = traces = read_traces(folder)
    ours = single_microbatch(plan, job)
    if (first.schedule, first.vocab, first.placement) != (ours.name, ours.vocab, ours.placement.stage_of):
        raise UserError(
            f"{folder} is the trace of a run with {_words(first.schedule, first.vocab, first.placement)}, but this job "
            f"has {_words(ours.name, ours.vocab, ours.placement.stage_of)}: simulate the job that was traced"
        )
    return mean_costs(traces).scaled(1e-3)


def _words(schedule: str, vocab: str, placement: tuple[tuple[int, ...], ...]) -> str:
    stages = sum(map(len, placement))
    return f"schedule {schedule}, vocab method {vocab}, {len(placement)} ranks and {stages} virtual stages"
