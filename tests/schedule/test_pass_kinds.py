"""Test that a new kind of pass needs one entry to be read, written, validated, timed, drawn, lowered and refused."""

import json
from dataclasses import replace

import pytest

from megatron_vp.schedule import (
    Held,
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
from megatron_vp.schedule.draw import to_picture, to_text
from megatron_vp.schedule.ledger import activation_levels
from megatron_vp.schedule.list_scheduler import MemoryLimits
from megatron_vp.schedule.reorder import reorder_for_costs
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
    yield define("Q", "gradient check", mark="q", per_chunk=True, waits_for=("W",))
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


def test_it_waits_for_what_its_entry_names(schedule, kind):
    """Also where the order of its rank does not say so: ahead of its W it can never run."""
    timeline = simulate(schedule, PassCosts(other={"Q": 1.0}))
    before = spans(timeline, PassKind.W)
    assert all(start >= before[place][1] for place, (start, _) in spans(timeline, kind).items())
    order = list(schedule.ranks[0])
    place = order.index(Pass(kind, 0, 0))
    order.insert(order.index(Pass(PassKind.W, 0, 0)), order.pop(place))
    with pytest.raises(ScheduleError, match=r"deadlock: Q0 on rank 0 waits for W0 on rank 0, which comes after Q0"):
        validate(replace(schedule, ranks=(tuple(order), *schedule.ranks[1:])))


def test_microbatches_and_ranks_may_have_it_or_not(kind):
    some = inserted(generate("v-half", 2, MICROBATCHES, vocab="vocab-1"), kind, microbatches=(1,), chunks=(0,))
    assert set(spans(validate(some), kind)) == {(0, 1, 0), (1, 1, 0)}
    one = replace(some, ranks=(some.ranks[0], tuple(step for step in some.ranks[1] if step.kind is not kind)))
    assert set(spans(validate(one), kind)) == {(0, 1, 0)}


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


def test_it_is_drawn_as_text_with_its_mark_and_its_cost(schedule):
    picture = to_text(simulate(schedule, PassCosts(other={"Q": 1.0})))
    assert "q" in picture.splitlines()[-1] and "Q=1" in picture
    assert "q is Q" in picture


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


def test_it_is_reordered_with_the_others(schedule, kind):
    """A pass that nothing waits for fills gaps; the same passes remain."""
    costs = PassCosts(other={"Q": 0.3})
    limits = MemoryLimits((2 * MICROBATCHES,) * 2)
    better = reorder_for_costs(schedule, limits, costs)
    assert [sorted(order) for order in better.ranks] == [sorted(order) for order in schedule.ranks]
    assert validate(better, costs).makespan <= simulate(schedule, costs).makespan


def test_an_evaluation_leaves_it_out_unless_its_entry_says_forward(schedule, kind):
    assert kind not in evaluation(schedule).kinds
    define("P", "probe", per_chunk=True, forward=True, waits_for=("F",))
    try:
        probed = inserted(schedule, PassKind.P, behind=PassKind.F)
        assert PassKind.P in evaluation(probed).kinds
        validate(evaluation(probed))
    finally:
        remove("P")


def test_it_may_hold_and_release_memory(kind):
    """A kind that takes over what another holds: the activations live until the last of the two."""
    remove("Q")
    later = define("Q", "gradient check", per_chunk=True, waits_for=("W",), releases=(Held.ACTIVATIONS,))
    split = inserted(generate("zb-h1", 2, MICROBATCHES), later, chunks=(0,))
    for rank, order in enumerate(split.ranks):
        level = 0
        for step, (during, after) in zip(order, activation_levels(split, rank), strict=True):
            during_expected = level + (step.kind is PassKind.F)
            level = during_expected - (step.kind is later)
            assert (during, after) == (during_expected, level), (rank, step)


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_that_it_releases_bounds_the_reordering(kind, ranks):
    """The list scheduler runs no forward for which there is no room until the new pass has released it."""
    remove("Q")
    later = define("Q", "gradient check", per_chunk=True, waits_for=("W",), releases=(Held.ACTIVATIONS,))
    schedule = inserted(generate("zb-h1", ranks, 8), later, microbatches=range(8), chunks=(0,))
    bound = [ranks] * ranks
    for costs in (PassCosts(other={"Q": 0.1}), PassCosts(other={"Q": 1.0}), PassCosts(F=0.5, W=2, other={"Q": 3.0})):
        validate(reorder_for_costs(schedule, MemoryLimits(tuple(bound)), costs), costs, memory_bound=bound)
