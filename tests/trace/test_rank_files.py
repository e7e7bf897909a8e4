"""Test trace files with known results: figures, merging, and one-line errors for files that are not from one run."""

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import PassCosts, PassKind, draw, generate, simulate
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.trace.figures import figures
from megatron_vp.trace.rank_files import (
    COLLECTIVE,
    LOSS,
    WAIT,
    RankTrace,
    TracedSpan,
    path_of,
    read_traces,
)

COSTS = PassCosts(F=3, B=6, W=0, S=1, T=1.5, IF=0.5, IB=0.25)
START = {4: 10.0, 5: 200.0}


def recorded(scale=1.0, schedule=None):
    """Traces of two iterations of a simulated run; `scale` stretches the times after they were simulated."""
    schedule = schedule or generate("1f1b", 3, 4, vocab="vocab-2", costs=COSTS)
    timeline = simulate(schedule, COSTS)
    traces = []
    for rank, order in enumerate(schedule.ranks):
        spans = [
            TracedSpan(
                iteration,
                Lane.COMPUTE,
                str(step),
                step.kind.value,
                offset + scale * start,
                offset + scale * end,
            )
            for iteration, offset in START.items()
            for step, (start, end) in zip(order, timeline.spans[rank], strict=True)
        ]
        placement = schedule.placement.stage_of
        about = schedule.name, schedule.vocab.value, placement, dict.fromkeys(START, schedule.microbatches)
        traces.append(RankTrace("7", rank, *about, tuple(spans)))
    return timeline, traces


def test_the_time_of_a_pair_counts_neither_as_forward_nor_as_backward():
    took = [("F", 3.0), ("F|B", 7.0), ("F|B", 7.0), ("B", 6.0), ("F", 5.0), ("B", 6.0)]
    spans, start = [], 0.0
    for kind, duration in took:
        spans.append(TracedSpan(4, Lane.COMPUTE, kind, kind, start, start + duration))
        start += duration
    found = figures([RankTrace("7", 0, "interleaved", "none", ((0, 1),), {4: 2}, tuple(spans))])
    assert (found.costs.F, found.costs.B) == (8, 12), "of both chunks of a rank"
    assert found.ranks[0].busy == 34


def with_spans(trace, *spans):
    return replace(trace, spans=tuple(sorted((*trace.spans, *spans), key=lambda span: span.start)))


def write(folder, traces):
    for trace in traces:
        path_of(folder, trace.rank).write_text(trace.to_json())


def test_a_simulated_run_has_the_times_that_were_simulated():
    timeline, traces = recorded()
    found = figures(traces)
    assert found.costs.named() == pytest.approx(COSTS.named()) and found.measured == pytest.approx(timeline.makespan)
    for rank, busy in zip(found.ranks, timeline.busy, strict=True):
        assert rank == pytest.approx((busy, 4 * (1 + 1.5), 0, 0))


def test_losses_and_waits_are_counted_where_they_are():
    _, traces = recorded()
    end = max(span.end for span in traces[2].spans if span.iteration == 4)
    trace = with_spans(
        traces[2],
        # After the last pass: a loss of 8 ms, and a collective that runs for 6 ms, 4 of them beside it.
        TracedSpan(4, Lane.COMPUTE, "LOSS:3", LOSS, end + 2, end + 10),
        TracedSpan(4, Lane.SECOND_STREAM, "C1:3", COLLECTIVE, end + 6, end + 12),
        TracedSpan(4, Lane.WAITS, "C1:3", WAIT, end + 11, end + 14),
    )
    before, after = figures(traces).ranks[2], figures([*traces[:2], trace]).ranks[2]
    # Means over two iterations.
    assert after.busy - before.busy == pytest.approx(8 / 2)
    assert after.communicating == pytest.approx(6 / 2)
    assert after.waiting == pytest.approx(3 / 2)
    assert after.vocabulary == pytest.approx(before.vocabulary)


def test_files_read_back(tmp_path):
    _, traces = recorded()
    traces[1] = with_spans(traces[1], TracedSpan(4, Lane.SECOND_STREAM, "C0:0", COLLECTIVE, 30, 31))
    write(tmp_path, traces)
    again = read_traces(tmp_path)
    assert [replace(trace, spans=()) for trace in again] == [replace(trace, spans=()) for trace in traces]
    for one, other in zip(again, traces, strict=True):
        for a, b in zip(one.spans, other.spans, strict=True):
            assert (a.name, a.category, a.lane, a.iteration) == (b.name, b.category, b.lane, b.iteration)
            assert (a.start, a.end) == pytest.approx((b.start, b.end))


def shown(events):
    """Passes by rank, name, category and time."""
    return {
        (e["pid"], e["name"], e["cat"], round(e["ts"])): e
        for e in events
        if e["ph"] == "X" and e["tid"] == Lane.COMPUTE
    }


def test_the_command_merges_into_what_the_simulator_draws(tmp_path):
    timeline, traces = recorded()
    traces = [
        replace(
            trace,
            microbatches={4: 4},
            spans=tuple(
                replace(span, start=span.start - 10, end=span.end - 10) for span in trace.spans if span.iteration == 4
            ),
        )
        for trace in traces
    ]
    write(tmp_path, traces)
    merged = tmp_path / "merged.json"
    result = CliRunner().invoke(app, ["trace", str(tmp_path), "-o", str(merged)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "schedule 1f1b, vocabulary vocab-2: 3 ranks, 4 microbatches, iterations 4 of the job"
    assert lines[-1].endswith("--cost F=3,B=6,W=0,S=1,T=1.5,IF=0.5,IB=0.25,comm=0")
    rows = [line.split() for line in lines[3:6]]
    for row, busy in zip(rows, timeline.busy, strict=True):
        assert float(row[1]) == pytest.approx(busy, abs=0.01)
        assert float(row[2]) == pytest.approx(100 * (1 - busy / timeline.makespan), abs=0.01)
        assert float(row[3]) == pytest.approx(100 * 10 / busy, abs=0.01)
    assert lines[-2] == f"iteration: {timeline.makespan:.2f} ms"
    events = json.loads(merged.read_text())["traceEvents"]
    simulated = json.loads(draw.to_perfetto(timeline))["traceEvents"]
    assert shown(events).keys() == shown(simulated).keys()
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0]
    assert names == ["compute", "second stream", "waits"]
    assert {kind.value for kind in PassKind} > {event.get("cat") for event in events if event["ph"] == "X"}


SPOILT = {
    "contains files of different runs (ranks 0 and 1)": (1, lambda trace: replace(trace, run="8")),
    "contains different iterations for rank 1 ([4, 5]) and rank 2 ([4])": (
        *(2, lambda trace: replace(trace, microbatches={4: 4})),
    ),
    "contains 2 files, of ranks [0, 2], but the run has ranks 0 to 2": (1, lambda trace: None),
}


@pytest.mark.parametrize("said", SPOILT)
def test_files_that_are_no_trace_of_one_run_get_one_line(tmp_path, said):
    _, traces = recorded()
    rank, spoil = SPOILT[said]
    traces[rank] = spoil(traces[rank])
    write(tmp_path, filter(None, traces))
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        figures(read_traces(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"otherData": {"run": "7"}, "traceEvents": []}', '{"a":' * 100_000])
def test_other_files_get_one_line(tmp_path, text):
    (tmp_path / "rank_0.json").write_text(text)
    with pytest.raises(UserError, match=r"rank_0\.json is truncated, or is not a file that --pipeline-trace"):
        read_traces(tmp_path)


def test_no_folder_and_no_files_get_one_line(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match=r"contains no rank_.*give the --pipeline-trace folder"):
            read_traces(folder)
