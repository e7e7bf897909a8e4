"""Test schedules with copies to the host's memory."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.cli.app import main
from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Pass,
    PassCosts,
    PassKind,
    ScheduleError,
    ScheduleRequest,
    from_json,
    generate,
    simulate,
    to_json,
)
from megatron_vp.schedule.dependencies import returning_at_once
from megatron_vp.schedule.families import family_of_text
from megatron_vp.schedule.validate import validate

NAMES = ("gis", "gis-h", "po")
OTHERS = [name for name in FAMILIES if name not in NAMES]


def assert_sound(name, p, m, chunks, method, count, costs):
    schedule = generate(name, p, m, chunks=chunks, vocab=method, costs=costs, offload_chunks=count)
    timeline = validate(schedule, costs)
    v = schedule.chunks
    promised = ScheduleRequest.of(FAMILIES[name], p, m, chunks=chunks, method=schedule.vocab).promised_peaks
    for rank, promise in enumerate(promised):
        assert timeline.peak_activation[rank] * v <= promise + 1e-9
        assert timeline.peak_host[rank] * v <= promise + 1 + 1e-9  # else passes wait where copies are slow
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
def test_random_schedules_are_valid_and_keep_their_promise(job):
    draw_sound(job)


def test_offloading_that_can_move_nothing_is_refused(capsys):
    arguments = ["schedule", "1f1b", "-p", "2", "-m", "8", "--offload-chunks", "all", "--cost", "copy=2"]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--offload-chunks moves no activations with 1f1b on 2 ranks: each chunk" in capsys.readouterr().err


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
