"""Test the trace of real processes over gloo: complete, ordered, on one time axis."""

from collections import Counter
from itertools import pairwise

import pytest

from megatron_vp.schedule.families import generate
from megatron_vp.schedule.instructions import Post, Wait
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, VocabMethod
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.transfers import Collective
from megatron_vp.trace.rank_files import COLLECTIVE, LOAD, LOSS, WAIT, read_traces
from tests.harness.ranks import run_ranks
from tests.runtime.toy import run_pipeline

WORLD = 3
STEPS = {1: 2, 2: 4, 3: 5}


@pytest.fixture(scope="module", params=["vocab-1", "vocab-2"])
def traced(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    steps = [(microbatches, True) for microbatches in STEPS.values()]
    run_ranks(WORLD, run_pipeline, "1f1b", request.param, steps, False, folder, timeout=60)
    return request.param, read_traces(folder), folder


def test_every_pass_loss_collective_and_wait_is_there_once(traced):
    method, traces, _ = traced
    for iteration in (2, 3):
        schedule = generate("1f1b", WORLD, STEPS[iteration], vocab=VocabMethod(method))
        for trace, program in zip(traces, lower(schedule), strict=True):
            spans = [span for span in trace.spans if span.iteration == iteration]
            passes = [span.name for span in spans if span.category in PassKind]
            assert passes == list(map(str, schedule.ranks[trace.rank])), "passes in the order of the schedule"
            collectives = [span.name for span in spans if span.category == COLLECTIVE]
            posts = [i.operation for i in program.instructions if isinstance(i, Post)]
            assert collectives == [str(operation) for operation in posts if isinstance(operation, Collective)]
            waits = Counter(span.name for span in spans if span.category == WAIT)
            assert waits == Counter(str(i.operation) for i in program.instructions if isinstance(i, Wait))
            loads = [span.name for span in spans if span.category == LOAD]
            assert loads == [f"LOAD:{m}" for m in range(STEPS[iteration])] * (trace.rank in (0, WORLD - 1))
            losses = [span.name for span in spans if span.category == LOSS]
            assert losses == ([f"LOSS:{m}" for m in range(STEPS[iteration])] if trace.rank == WORLD - 1 else [])


def test_lanes_do_not_overlap_and_waits_lie_between_computations(traced):
    for trace in traced[1]:
        assert {span.iteration for span in trace.spans} == {2, 3}
        host = [span for span in trace.spans if span.lane in (Lane.COMPUTE, Lane.WAITS)]
        second_stream = [span for span in trace.spans if span.lane is Lane.SECOND_STREAM]
        for lane in (host, second_stream):
            assert all(span.start <= span.end for span in lane)
            assert all(a.end <= b.start + 1e-6 for a, b in pairwise(lane))


def test_a_collective_runs_then_is_waited_for(traced):
    for trace in traced[1]:
        waited = {(span.iteration, span.name): span for span in trace.spans if span.category == WAIT}
        for span in trace.spans:
            if span.category == COLLECTIVE:
                wait = waited.get((span.iteration, span.name))
                # The wait ends once the collective has; the hand-over between threads takes its time.
                assert wait is None or span.end <= wait.end + 1e-6


def test_ranks_share_a_time_axis(traced):
    _, traces, _ = traced
    assert all(span.start >= 0 for trace in traces for span in trace.spans)
    ended = {(t.rank, s.iteration, s.name): s.end for t in traces for s in t.spans if s.lane is Lane.COMPUTE}
    started = {(t.rank, s.iteration, s.name): s.start for t in traces for s in t.spans if s.lane is Lane.COMPUTE}
    for rank, iteration, name in started:
        if name.startswith("F") and rank:
            assert started[rank, iteration, name] >= ended[rank - 1, iteration, name], "F follows F of the stage before"
        if name.startswith("B") and rank + 1 < WORLD:
            assert started[rank, iteration, name] >= ended[rank + 1, iteration, name]
