"""Test schedules with copies to the host's memory, against a player of their JSON that does not use the package."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.cli.app import main
from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Copy,
    Pass,
    PassCosts,
    PassKind,
    ScheduleError,
    ScheduleRequest,
    from_json,
    generate,
    lower,
    programs_to_json,
    simulate,
    to_json,
)
from megatron_vp.schedule.dependencies import returning_at_once
from megatron_vp.schedule.families import family_of_text
from megatron_vp.schedule.validate import validate
from tests.schedule.program_player import HostWaits, stuck_ranks

NAMES = ("gis", "gis-h", "po")
OTHERS = [name for name in FAMILIES if name not in NAMES]


def play(document, costs):
    """Peaks on device and host by rank, in chunks, and the end of the last pass, of a schedule's JSON without times.

    A copy out is queued when its F ends and a copy back by its R; a rank's lane runs them in that order. O waits for
    the one, B or BW for the other.
    """
    chunks, stages = document["chunks"], {}
    for rank, row in enumerate(document["placement"]):
        for chunk, stage in enumerate(row):
            stages[rank, chunk] = stage
    where = {stage: seat for seat, stage in stages.items()}
    last = len(where) - 1
    took = {"F": costs.F / chunks, "B": costs.B / chunks, "W": costs.W / chunks, "O": 0.0, "R": 0.0}
    if not any(each["pass"] == "W" for order in document["ranks"] for each in order):
        took["B"] += took["W"]
    took |= {"BW": took["B"] + took["W"], "S": costs.S, "T": costs.T, "IF": costs.IF, "IB": costs.IB}
    offloaded = {tuple(pair) for pair in document["offloaded"]}
    copy = costs.other.get("copy", 0.0) / chunks
    ends, copied = {}, {}
    free, lane = [0.0] * len(document["ranks"]), [0.0] * len(document["ranks"])
    holders = [rank for rank, order in enumerate(document["ranks"]) if any(each["pass"] == "S" for each in order)]

    def backward(stage, microbatch):
        rank, chunk = where[stage]
        whole = "BW", microbatch, rank, chunk
        return whole if whole in ends else ("B", microbatch, rank, chunk)

    def needs(kind, microbatch, rank, chunk):
        stage, vocab = stages[rank, chunk], document["vocab"]
        match kind:
            case "F" if stage:
                return [("F", microbatch, *where[stage - 1])]
            case "F":
                return [("IF", microbatch, each, 0) for each in holders]
            case "S":
                return [("F", microbatch, *where[last])]
            case "T":
                return [("S", microbatch, each, 0) for each in holders]
            case "B" | "BW" if stage < last:
                return [backward(stage + 1, microbatch)]
            case "B" | "BW":
                kinds = {"none": (), "vocab-1": ("T",), "vocab-2": ("S",)}[vocab]
                return [("F", microbatch, *where[last])] + [(k, microbatch, r, 0) for k in kinds for r in holders]
            case "W":
                return [("B", microbatch, rank, chunk)]
            case "IB":
                return [backward(0, microbatch)]
        return []

    places, device, host = [0] * len(free), [0] * len(free), [0] * len(free)
    peaks = [[0] * len(free) for _ in range(2)]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(document["ranks"]):
            while places[rank] < len(order):
                step = order[places[rank]]
                kind, microbatch, chunk = step["pass"], step["microbatch"], step["chunk"]
                before = needs(kind, microbatch, rank, chunk)
                if any(each not in ends for each in before):
                    break
                away, key = (rank, chunk) in offloaded, (rank, microbatch, chunk)
                begin = max([free[rank], *(ends[each] for each in before)])
                if kind == "O":
                    begin = max(begin, copied["out", *key])
                if kind in ("B", "BW") and away:
                    begin = max(begin, copied["in", *key])
                    host[rank] -= 1
                end = ends[kind, microbatch, rank, chunk] = free[rank] = begin + took[kind]
                if (kind == "F" and away) or kind == "R":
                    lane[rank] = copied["out" if kind == "F" else "in", *key] = max(lane[rank], end) + copy
                device[rank] += (kind in ("F", "R")) - (kind == "O")
                host[rank] += kind == "F" and away
                for level, peak in zip((device, host), peaks, strict=True):
                    peak[rank] = max(peak[rank], level[rank])
                released = "W" if "W" in {each["pass"] for each in order} else "B"
                device[rank] -= kind in (released, "BW")
                places[rank] += 1
                moved = True
    assert places == [len(order) for order in document["ranks"]], "the order cannot proceed"
    assert device == host == [0] * len(free)
    return peaks, max(end for key, end in ends.items())


def assert_sound(name, p, m, chunks, method, count, costs):
    schedule = generate(name, p, m, chunks=chunks, vocab=method, costs=costs, offload_chunks=count)
    timeline = validate(schedule, costs)
    document = json.loads(to_json(schedule)) | {"offloaded": schedule.offloaded}
    v = schedule.chunks
    peaks, span = play(document, costs)
    for ours, theirs in zip((timeline.peak_activation, timeline.peak_host), peaks, strict=True):
        assert [value * v for value in ours] == pytest.approx(theirs)
    assert timeline.makespan == pytest.approx(span, rel=1e-6)
    promised = ScheduleRequest.of(FAMILIES[name], p, m, chunks=chunks, method=schedule.vocab).promised_peaks
    for rank, promise in enumerate(promised):
        assert peaks[0][rank] <= promise
        assert peaks[1][rank] <= promise + 1  # else passes wait where copies are slow
        order = schedule.ranks[rank]
        place = {step: k for k, step in enumerate(order)}
        for chunk, microbatch in product(range(v), range(m)):
            kinds = [k for k in PassKind if Pass(k, microbatch, chunk) in place]
            steps = [place[Pass(kind, microbatch, chunk)] for kind in ("F", "O", "R") if kind in kinds]
            backward = next(place[Pass(kind, microbatch, chunk)] for kind in ("B", "BW") if kind in kinds)
            assert [*steps, backward] == sorted([*steps, backward])
            assert len(steps) == (3 if (rank, chunk) in schedule.offloaded else 1)
    assert len(schedule.offloaded) <= p * count and not returning_at_once(schedule)
    return timeline


def test_activations_never_leave_for_nothing():
    """Without its check, the first order found for this job has an R next to its O."""
    assert_sound("v-half", 2, 3, 2, "none", 2, PassCosts())


jobs = st.tuples(
    st.sampled_from([*NAMES, *OTHERS]),
    st.integers(2, 6),
    st.integers(1, 14),
    st.integers(2, 4),
    st.sampled_from(["none", "vocab-1", "vocab-2"]),
    st.integers(1, 4),
    st.tuples(*[st.sampled_from([0.5, 1.0, 1.0, 1.9, 3.0])] * 3),
    st.sampled_from([0.0, 0.25, 0.75, 1.5, 5.0]),
)


def draw_sound(job):
    name, p, m, chunks, method, count, (forward, backward, weight), copy = job
    family = FAMILIES[name]
    chunks = chunks if family.chunks is None else family.chunks
    costs = PassCosts(F=forward, B=backward, W=weight, other={"copy": copy})
    if family.own_method is not None:
        schedule = generate(name, p, m, costs=costs, offload_chunks=1)
        assert all(device <= 1.5 * p for device in validate(schedule, costs).peak_activation)
        return
    assert_sound(name, p, m, chunks, method, min(count, chunks), costs)


@settings(max_examples=60, deadline=None)
@given(jobs)
def test_random_schedules_are_valid_and_as_an_independent_player_plays_them(job):
    draw_sound(job)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(jobs)
def test_thousands_of_random_schedules_are(job):
    draw_sound(job)


@pytest.mark.parametrize(("name", "stay"), [("po", 2), ("v-half", 2), ("1f1b", 3)])
def test_copies_that_take_longer_than_the_passes_set_the_pace_and_all_chunks_still_leave(name, stay):
    """But for the last chunks of late ranks, whose backward follows their forward."""
    v, found = FAMILIES[name].chunks or 4, []
    for load in (1.0, 1.5, 3.0):
        costs = PassCosts(F=v, B=v, W=v, other={"copy": load * 3 * v / 2})
        timeline = simulate(generate(name, 8, 32, chunks=v, costs=costs, offload_chunks=v), costs)
        assert len(timeline.schedule.offloaded) == 8 * v - stay
        assert timeline.makespan <= 1.06 * load * 32 * 3 * v + 3 * 8 * v
        found.append(max(timeline.peak_activation) * v)
    assert max(found[1:]) <= found[0]


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, family in FAMILIES.items() for method in family.methods]
)
def test_as_many_chunks_leave_with_more_microbatches(name, method):
    """Copies keep pace with the passes, so they do not fall behind from microbatch to microbatch."""
    costs = PassCosts(F=100, B=120, W=80, S=10, T=10, IF=2, IB=2, other={"copy": 300.0})
    few, many = (
        ScheduleRequest.of(FAMILIES[name], 8, m, method=method, costs=costs, offload_chunks=FAMILIES[name].chunks or 2)
        .placed()
        .schedule.offloaded
        for m in (8, 64)
    )
    assert few == many and len(many) >= 4 * (FAMILIES[name].chunks or 2)


def test_offloading_that_can_move_nothing_is_refused(capsys):
    arguments = ["schedule", "1f1b", "-p", "2", "-m", "8", "--offload-chunks", "all", "--cost", "copy=2"]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--offload-chunks moves no activations with 1f1b on 2 ranks: each chunk" in capsys.readouterr().err


def test_half_of_the_chunks_leave_less_than_a_third_of_interleaved_ones():
    costs = PassCosts(F=4, B=4, W=4, other={"copy": 3.0})
    held = [
        max(simulate(generate(name, 8, 32, chunks=4, costs=costs, offload_chunks=count), costs).peak_activation)
        for name, count in (("po", 2), ("interleaved", 0))
    ]
    assert held[0] <= 0.3 * held[1]


def test_copies_are_posted_behind_what_makes_their_data_and_run_as_posted():
    schedule = generate("po", 2, 4, chunks=2, costs=PassCosts(other={"copy": 1.0}), offload_chunks=2)
    for program in lower(schedule):
        posted = [
            str(each.operation)
            for each in program.instructions
            if hasattr(each, "operation") and isinstance(each.operation, Copy) and str(each)[0] == "+"
        ]
        expected = [
            f"copy-{'out' if step.kind is PassKind.F else 'in'}:{step.microbatch}.{step.chunk}[{program.rank}]"
            for step in schedule.ranks[program.rank]
            if step.kind in (PassKind.F, PassKind.R) and (program.rank, step.chunk) in schedule.offloaded
        ]
        assert posted == expected


@pytest.mark.parametrize("waits", HostWaits, ids=lambda waits: waits.name)
@pytest.mark.parametrize("method", ["none", "vocab-1", "vocab-2"])
def test_programs_end_however_long_hosts_wait(method, waits):
    costs = PassCosts(other={"copy": 1.0})
    schedule = generate("po", 3, 7, chunks=3, vocab=method, costs=costs, offload_chunks=3)
    assert not stuck_ranks(programs_to_json(schedule, lower(schedule, costs)), waits)


@pytest.fixture
def some():
    return generate("po", 2, 3, chunks=2, offload_chunks=1)


def edited(schedule, edit):
    document = json.loads(to_json(schedule))
    edit(document["ranks"][0])
    del document["offloaded"]
    return from_json(json.dumps(document))


def find(order, kind, microbatch):
    return next(k for k, e in enumerate(order) if (e["pass"], e["microbatch"]) == (kind, microbatch) and not e["chunk"])


def test_activations_that_come_back_behind_their_backward_are_refused(some):
    def swap(order):
        back, used = find(order, "R", 0), find(order, "B", 0)
        order.insert(used, order.pop(back))

    with pytest.raises(ScheduleError, match=r"deadlock: B0 on rank 0 waits for R0 on rank 0"):
        validate(edited(some, swap))


@pytest.mark.parametrize("kind", ["O", "R"])
def test_a_file_with_incomplete_copies_is_refused(some, kind):
    with pytest.raises(ScheduleError, match=f"rank 0 lacks {kind}1 "):
        validate(edited(some, lambda order: order.pop(find(order, kind, 1))))


@pytest.mark.parametrize(
    ("name", "method", "count", "copy"),
    [("zb-v", "vocab-2", 1, 0.25), ("zb-v", "none", 2, 0.25), ("po", "vocab-2", 2, 0.75), ("1f1b", "none", 1, 0.25)],
)
def test_the_first_microbatches_of_a_file_run(name, method, count, copy):
    """A rehearsal and a replay cut a file's order; the passes between an O and its R may be gone."""
    whole = generate(name, 4, 16, vocab=method, costs=PassCosts(other={"copy": copy}), offload_chunks=count)
    family = family_of_text("some.json", to_json(whole))
    peaks, adjacent = simulate(whole).peak_activation, 0
    for microbatches in range(1, 16):
        adjacent += len(returning_at_once(whole.first_microbatches(microbatches)))
        timeline = validate(ScheduleRequest.of(family, 4, microbatches, method=whole.vocab).schedule())
        assert timeline.schedule.microbatches == microbatches
        assert timeline.schedule.offloaded == whole.offloaded
        assert all(own <= peak for own, peak in zip(timeline.peak_activation, peaks, strict=True))
    assert adjacent


def test_the_file_says_what_is_offloaded_and_reads_back(some):
    document = json.loads(to_json(some, simulate(some)))
    assert document["offloaded"] == [[0, 0], [1, 0]]
    assert document["metrics"]["peak_host"] == list(simulate(some).peak_host)
    assert from_json(json.dumps(document)) == some
    document["offloaded"] = [[0, 1]]
    with pytest.raises(
        UserError,
        match=r"sets 'offloaded' to \[\[0, 1\]\], but its placement and passes require \[\[0, 0\], ",
    ):
        from_json(json.dumps(document))


@pytest.mark.parametrize(("name", "count"), [("v-half", 3), ("1f1b", 2), ("po", -1)])
def test_more_chunks_than_there_are_is_refused(name, count):
    with pytest.raises(UserError, match=f"cannot offload {count} chunks with schedule {name}, which has"):
        generate(name, 4, 8, offload_chunks=count)
