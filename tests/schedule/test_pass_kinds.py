"""Test that a new kind of pass needs one entry to be read, written, validated, timed, drawn, lowered and refused."""

import json
from dataclasses import replace

import pytest

from megatron_vp.schedule import (
    Pass,
    PassCosts,
    PassKind,
    Run,
    ScheduleError,
    evaluation,
    from_csv,
    from_json,
    generate,
    lower,
    programs_to_json,
    simulate,
    to_csv,
    to_json,
)
from megatron_vp.schedule.draw import to_picture
from megatron_vp.schedule.validate import validate

COLOUR = "#123456"
MICROBATCHES = 3


def define(name, meaning, **more):
    """Add an entry to the enumeration, as a line in its class would."""
    kind = PassKind._new_member_(PassKind, name, meaning, COLOUR, more)
    kind._name_ = name
    type.__setattr__(PassKind, name, kind)
    PassKind._member_names_.append(name)
    PassKind._member_map_[name] = PassKind._value2member_map_[name] = kind
    return kind


def remove(name):
    type.__delattr__(PassKind, name)
    PassKind._member_names_.remove(name)
    del PassKind._member_map_[name], PassKind._value2member_map_[name]


@pytest.fixture
def kind():
    """A pass that checks the weights' gradients of a chunk, after the W of the same chunk and microbatch."""
    yield define("Q", "gradient check", per_chunk=True, waits_for=("W",))
    remove("Q")


def inserted(schedule, kind, microbatches=range(MICROBATCHES), chunks=(0, 1), behind=PassKind.W):
    """`schedule` with a pass of `kind` right behind each pass that it waits for."""
    ranks = []
    for order in schedule.ranks:
        found = []
        for step in order:
            found.append(step)
            if step.kind is behind and step.microbatch in microbatches and step.chunk in chunks:
                found.append(Pass(kind, step.microbatch, step.chunk))
        ranks.append(tuple(found))
    return replace(schedule, ranks=tuple(ranks))


@pytest.fixture(params=["none", "vocab-2"])
def schedule(request, kind):
    return inserted(generate("v-half", 2, MICROBATCHES, vocab=request.param), kind)


def spans(timeline, kind):
    """Start and end of all passes of `kind`, by rank, microbatch and chunk."""
    return {
        (rank, step.microbatch, step.chunk): span
        for rank, (order, each) in enumerate(zip(timeline.schedule.ranks, timeline.spans, strict=True))
        for step, span in zip(order, each, strict=True)
        if step.kind is kind
    }


def test_it_is_written_to_files_and_read_back(schedule):
    timeline = simulate(schedule)
    for written in (to_json(schedule), to_json(schedule, timeline)):
        assert from_json(written) == schedule
    assert from_csv(to_csv(schedule)) == replace(schedule, name="pytorch")


def test_it_is_proven_and_takes_no_time_unless_costs_name_it(schedule, kind):
    free = validate(schedule)
    assert {end - start for start, end in spans(free, kind).values()} == {0}
    bare = replace(schedule, ranks=tuple(tuple(s for s in order if s.kind is not kind) for order in schedule.ranks))
    assert free.makespan == simulate(bare).makespan


def test_it_is_timed_by_costs_that_name_it(schedule, kind):
    """Like F, B and W, the cost of a kind of each chunk is that of all chunks of a rank."""
    assert PassCosts.parse("Q=0.5") == PassCosts(other={"Q": 0.5})
    timeline = validate(schedule, PassCosts.parse("Q=0.5"))
    assert {round(end - start, 9) for start, end in spans(timeline, kind).values()} == {0.25}
    assert timeline.busy[0] == pytest.approx(simulate(schedule).busy[0] + 0.5 * MICROBATCHES)


@pytest.mark.parametrize(
    "extra, words",
    [
        (Pass.parse("F0"), "repeats F0"),
        ("Q0", "repeats Q0"),
        ("Q7", "must not list Q7"),
        ("Q0.2", "must not list Q0.2"),
    ],
)
def test_it_is_refused_twice_and_where_there_is_no_such_microbatch_or_chunk(schedule, kind, extra, words):
    step = extra if isinstance(extra, Pass) else Pass.parse(extra)
    with pytest.raises(ScheduleError, match=f"rank 1 {words}"):
        validate(replace(schedule, ranks=(schedule.ranks[0], (*schedule.ranks[1], step))))


def test_it_is_drawn_in_pictures_with_colour_and_legend(schedule):
    picture = to_picture(simulate(schedule, PassCosts(other={"Q": 1.0})), "svg").decode()
    assert COLOUR in picture and "Q gradient check, chunk 1" in picture
    assert to_picture(simulate(schedule), "png").startswith(b"\x89PNG")


def test_it_is_lowered_to_programs(schedule, kind):
    programs = lower(schedule)
    for rank, program in enumerate(programs):
        runs = [each.action for each in program.instructions if isinstance(each, Run)]
        assert runs == list(schedule.ranks[rank])
    written = json.loads(programs_to_json(schedule, programs))["programs"]
    assert {"do": "run", "pass": "Q", "chunk": 1, "microbatch": 2} in written[1]


def test_an_evaluation_leaves_it_out_unless_its_entry_says_forward(schedule, kind):
    assert kind not in evaluation(schedule).kinds
    define("P", "probe", per_chunk=True, forward=True, waits_for=("F",))
    try:
        probed = inserted(schedule, PassKind.P, behind=PassKind.F)
        assert PassKind.P in evaluation(probed).kinds
        validate(evaluation(probed))
    finally:
        remove("P")
