"""Test schedules in which a forward and a backward of a rank run as one."""

import json
from dataclasses import replace
from itertools import pairwise, takewhile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Load,
    Loss,
    Message,
    Pass,
    PassCosts,
    PassKind,
    Post,
    Run,
    RunPair,
    ScheduleError,
    draw,
    evaluation,
    from_csv,
    from_json,
    generate,
    lower,
    programs_to_json,
    simulate,
    to_csv,
    to_json,
    validate,
    web_page,
)
from megatron_vp.schedule.dependencies import build_graph, join_pairs
from megatron_vp.schedule.graph import Step
from megatron_vp.schedule.instructions import kind_of, passes_of
from megatron_vp.schedule.node_times import durations, node_times
from megatron_vp.schedule.pass_kinds import Held
from tests.schedule.program_player import HostWaits, stuck_ranks

PAIRED = [name for name, family in FAMILIES.items() if family.overlapped]
METHODS = ["none", "vocab-1", "vocab-2"]


def command(*arguments):
    return CliRunner().invoke(app, ["schedule", *arguments])


def pairs_of(program):
    return [each for each in program.instructions if isinstance(each, RunPair)]


def ends_of_steps(schedule, programs, costs):
    """The end of every pass, if each rank runs its steps in the order of its program."""
    graph = build_graph(schedule, with_loss=True)
    join_pairs(graph, schedule)
    orders = [[Step(each.rank, step) for i in each.instructions for step in steps_of(i)] for each in programs]
    numbers = [list(map(graph.number, order)) for order in orders]
    times = node_times(graph, numbers, durations(graph, schedule, costs))
    return dict(zip(graph.nodes, times.end, strict=True))


def steps_of(instruction):
    return (instruction,) if isinstance(instruction, Loss) else passes_of(instruction)


def assert_messages_follow_their_pairs(schedule, programs, costs):
    """Right behind a pair, its forward's message is posted, then its backward's. No receive stands before its pair
    ends.
    """
    ends, made_by = ends_of_steps(schedule, programs, costs), {}
    for program in programs:
        rank, instructions = program.rank, program.instructions
        stages = schedule.placement.stage_of[rank]
        for place, pair in enumerate(instructions):
            if isinstance(pair, RunPair):
                behind = takewhile(lambda each: isinstance(each, Load | Post), instructions[place + 1 :])
                posted = [each.operation for each in behind if isinstance(each, Post)]
                seats = {"activation": pair.forward, "gradient": pair.backward}
                sent = [
                    one for one in posted if isinstance(one, Message) and one.channel in seats and one.source == rank
                ]
                expected = [
                    (channel, step.microbatch, stages[step.chunk], stages[step.chunk] + way)
                    for (channel, step), way in zip(seats.items(), (1, -1), strict=True)
                    if 0 <= stages[step.chunk] + way < schedule.placement.stages
                    and schedule.placement.rank_of(stages[step.chunk] + way) != rank
                ]
                assert [message[:4] for message in sent] == expected
                made_by |= {message: Step(rank, pair.backward) for message in sent}
    for program in programs:
        instructions = program.instructions
        for place, instruction in enumerate(instructions):
            message = getattr(instruction, "operation", None)
            if isinstance(instruction, Post) and message in made_by and message.target == program.rank:
                steps = [[Step(program.rank, step) for step in passes_of(i)] for i in instructions[place:]]
                assert min(max(ends[step] for step in each) for each in steps if each) >= ends[made_by[message]] - 1e-9


def as_scheduled(schedule, program):
    """A program whose pairs hold whole backwards, as in the schedule. With W passes, what a pair leaves of its weight
    gradients stands right behind its messages.
    """
    written, left = [], None
    for each in program.instructions:
        if left is not None and not isinstance(each, Load | Post):
            assert each == Run(left)
            left = None
            continue
        if isinstance(each, RunPair) and schedule.split_backward:
            assert each.backward.kind is PassKind.B
            left = each.backward._replace(kind=PassKind.W)
            each = RunPair(each.forward, each.backward._replace(kind=PassKind.BW))
        written.append(each)
    assert left is None
    return replace(program, instructions=tuple(written))


def assert_runs(name, p, m, v, vocab, costs):
    v = FAMILIES[name].chunks or v
    schedule = generate(name, p, m, chunks=v, vocab=vocab, costs=costs, overlapped=True)
    validate(schedule, costs)
    programs = lower(schedule, costs)
    promise = FAMILIES[name].promised_peak
    text = programs_to_json(schedule, programs)
    programs = [as_scheduled(schedule, program) for program in programs]
    for program, pairs in zip(programs, schedule.pairs or [()] * p, strict=True):
        rank = program.rank
        assert {(each.forward, each.backward) for each in pairs_of(program)} == {*pairs}
        assert program.peaks[Held.ACTIVATIONS] <= promise(p, rank, v, m, schedule.vocab, overlapped=True)
        order = [step for each in program.instructions for step in passes_of(each)]
        assert tuple(order) == schedule.ranks[rank]
        alone = 2 * (p - 1 - rank) + (v - 1) * p + 1 + schedule.vocab.barriers
        if name == "interleaved" and m % p == 0:
            assert len(pairs) == max(0, m * v - alone)
    for waits in HostWaits:
        assert not stuck_ranks(text, waits), waits
    assert_messages_follow_their_pairs(schedule, programs, costs)
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_schedule_with_pairs_ends_within_its_promised_memory(count):
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(PAIRED),
        st.integers(2, 5),
        st.integers(1, 9),
        st.integers(2, 3),
        st.sampled_from(METHODS),
        st.builds(PassCosts, *[st.floats(0.1, 3.0)] * 3, *[st.floats(0.0, 1.0)] * 4, comm=st.floats(0.0, 2.0)),
    )
    def check(name, p, m, v, vocab, costs):
        assert_runs(name, p, m, v, vocab, costs)

    check()


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("vocab", METHODS)
def test_equal_times_leave_the_messages_of_a_pair_in_order(name, vocab):
    assert_runs(name, 2, 8, 2, vocab, PassCosts())
    assert_runs(name, 4, 12, 2, vocab, PassCosts())


@pytest.mark.parametrize("name", PAIRED)
def test_without_the_option_nothing_runs_as_one(name):
    assert generate(name, 3, 7).pairs == ()


def test_evaluation_and_fewer_microbatches_drop_pairs():
    schedule = generate("interleaved", 2, 6, overlapped=True)
    assert evaluation(schedule).pairs == () == schedule.forward_only().pairs
    fewer = schedule.first_microbatches(4)
    kept = [[pair for pair in pairs if max(step.microbatch for step in pair) < 4] for pairs in schedule.pairs]
    assert [list(pairs) for pairs in fewer.pairs] == kept and any(kept)
    validate(fewer)


def test_programs_write_a_pair_as_two_adjacent_joined_runs():
    schedule = generate("dualpipe-v", 2, 6, vocab="vocab-2", overlapped=True)
    written = json.loads(programs_to_json(schedule, lower(schedule)))
    assert written["pairs"] == [[[str(f), str(b)] for f, b in pairs] for pairs in schedule.pairs]
    for program, pairs in zip(written["programs"], schedule.pairs, strict=True):
        joined = [place for place, each in enumerate(program) if each.get("joined")]
        assert len(joined) == 2 * len(pairs)
        for first, second in zip(joined[::2], joined[1::2], strict=True):
            assert (second - first, program[first]["pass"], program[second]["pass"]) == (1, "F", "B")


def test_formats_show_what_runs_as_one():
    schedule = generate("dualpipe-v", 2, 6, vocab="vocab-1", overlapped=True)
    read = from_csv(to_csv(schedule))
    assert (read.pairs, read.ranks) == (schedule.pairs, schedule.ranks)
    whole = generate("interleaved", 3, 6, overlapped=True)
    assert from_csv(to_csv(whole)).pairs == whole.pairs
    timeline = simulate(schedule)
    slices = [each for each in json.loads(draw.to_perfetto(timeline))["traceEvents"] if each.get("cat") == "F|B"]
    assert [each["name"] for each in slices] == [f"{f}|{b}" for pairs in schedule.pairs for f, b in pairs]
    forward, backward = schedule.pairs[0][0]
    place = schedule.ranks[0].index(forward)
    start, end = timeline.spans[0][place][0], timeline.spans[0][place + 1][1]
    assert (slices[0]["ts"], slices[0]["dur"]) == pytest.approx((1e3 * start, 1e3 * (end - start)))
    assert f'"{forward}, as one with {backward}"' in web_page.to_html([timeline])
    counts = [line.split()[-1] for line in draw.to_text(timeline).splitlines()[-2:]]
    assert counts == [str(len(pairs)) for pairs in schedule.pairs]
    assert b"framed: two passes run as one" in draw.to_picture(timeline, "svg")


def test_the_command_takes_megatrons_option(tmp_path):
    option = "--overlap-moe-expert-parallel-comm"
    sizes, output = ["interleaved", "-p", "2", "-m", "4"], str(tmp_path / "pairs.json")
    assert command(*sizes, option, "-o", output).exit_code == 0
    written = from_json((tmp_path / "pairs.json").read_text())
    assert written.pairs == generate("interleaved", 2, 4, overlapped=True).pairs != ()
    assert "leave out --overlap" in str(command("--from", output, option).exception)
    assert command("--from", output, "--format", "programs").output.count('"joined": true') > 0


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("F4", "B2"), "rank 0 cannot run F4 and B2 as one: a pair is an F and the B right after it"),
        (("B0", "F5"), "rank 0 cannot run B0 and F5 as one"),
    ],
)
def test_a_pair_that_cannot_run_as_one_is_refused(pair, words):
    schedule = generate("interleaved", 2, 6, overlapped=True)
    with pytest.raises(ScheduleError, match=words):
        validate(replace(schedule, pairs=((tuple(map(Pass.parse, pair)),), ())))


def test_passes_that_need_each_other_cannot_run_as_one():
    schedule = generate("interleaved", 2, 4)
    # On the last stage, a backward needs the forward right before it.
    pairs = [pair for pair in pairwise(schedule.ranks[1]) if [step.kind for step in pair] == [PassKind.F, PassKind.B]]
    same = [pair for pair in pairs if pair[0][1:] == pair[1][1:]]
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(replace(schedule, pairs=((), tuple(same))))


@pytest.mark.parametrize(("name", "more"), [("1f1b", {}), ("v-half", {}), ("interleaved", {"offload_chunks": 1})])
def test_schedules_without_pairs_refuse_the_option(name, more):
    with pytest.raises(UserError, match=r"run as one"):
        generate(name, 2, 4, overlapped=True, **more)


def test_a_file_runs_its_pairs_only_with_the_option(tmp_path):
    schedule = generate("dualpipe-v", 2, 6, overlapped=True)
    path = tmp_path / "pairs.json"
    path.write_text(to_json(schedule, simulate(schedule)))
    assert generate(str(path), 2, 6, overlapped=True).pairs == schedule.pairs
    assert generate(str(path), 2, 6).pairs == ()
    path.with_name("alone.json").write_text(to_json(generate("dualpipe-v", 2, 6)))
    with pytest.raises(UserError, match="has no pairs"):
        generate(str(path.with_name("alone.json")), 2, 6, overlapped=True)


def test_a_pair_counts_as_its_two_passes():
    pair = RunPair(Pass.parse("F4.1"), Pass.parse("B0"))
    assert (kind_of(pair), kind_of(Run(pair.forward))) == ("F|B", "F"), "reports count it neither as F nor as B"
    assert str(pair) == "F4.1|B0" and passes_of(pair) == (pair.forward, pair.backward)
    assert passes_of(Run(pair.forward)) == (pair.forward,) and passes_of(Loss(3)) == ()
