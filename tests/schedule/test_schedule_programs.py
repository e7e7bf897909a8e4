"""Test lowered programs for what the executor relies on, and the validator with broken schedules and programs."""

from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.schedule import (
    FAMILIES,
    Load,
    Loss,
    Message,
    Pass,
    PassCosts,
    PassKind,
    Placement,
    Post,
    Run,
    Schedule,
    ScheduleError,
    VocabMethod,
    Wait,
    evaluation,
    generate,
    lower,
    simulate,
    validate,
    validate_programs,
)
from megatron_vp.schedule.dependencies import build_graph
from megatron_vp.schedule.graph import Step
from megatron_vp.schedule.node_times import durations, node_times
from tests.schedule.early_receives import with_early_receives


def texts(program):
    return [str(instruction) for instruction in program.instructions]


def assert_in_order(words, *expected):
    places = [words.index(word) for word in expected]
    assert places == sorted(places), list(zip(expected, places, strict=True))


SIZES = [(2, 1), (2, 5), (4, 3)]


@pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_rank_waits_for_what_its_passes_need(p, m, vocab):
    for program in lower(generate("1f1b", p, m, vocab=vocab)):
        words, last = texts(program), program.rank == p - 1
        for i in range(m):
            assert_in_order(words, f"+TOKENS:{i}", f"?TOKENS:{i}", f"IF{i}", f"+EMBED:{i}")
            assert_in_order(words, f"+C0:{i}", f"?C0:{i}", f"S{i}", f"+C1:{i}", f"?C1:{i}", f"T{i}")
            if i:
                assert_in_order(words, f"+TOKENS:{i - 1}", f"+TOKENS:{i}", f"IF{i - 1}")
            assert_in_order(words, f"+LOSS_GRAD:{i}", f"?LOSS_GRAD:{i}", f"T{i}")
            assert_in_order(words, f"+EMBED_GRAD:{i}", f"?EMBED_GRAD:{i}", f"IB{i}")
            assert (f"?EMBED:{i}" in words) == (program.rank == 0)
            if program.rank == 0:
                assert_in_order(words, f"?EMBED:{i}", f"F{i}")
                assert_in_order(words, f"B{i}", f"+EMBED_GRAD:{i}")
            if last:
                assert_in_order(words, f"F{i}", f"+C0:{i}")
                assert_in_order(words, f"?C1:{i}", f"LOSS:{i}", f"+LOSS_GRAD:{i}", f"?LOSS_GRAD:{i}", f"B{i}")
            assert (f"LOSS:{i}" in words) == last
            assert (f"+C2:{i}" in words) == (vocab == "vocab-1")
            assert (f"?C2:{i}" in words) == (vocab == "vocab-1" and last)
            if vocab == "vocab-1":
                assert_in_order(words, f"T{i}", f"+C2:{i}")
                if last:
                    assert_in_order(words, f"?C2:{i}", f"B{i}")


READS = [(name, str(method)) for name, family in FAMILIES.items() for method in family.methods]


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize(("name", "vocab"), READS)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_data_is_read_in_order_right_before_its_first_use(p, m, name, vocab, evaluates):
    schedule = generate(name, p, m, vocab=vocab)
    schedule = evaluation(schedule) if evaluates else schedule
    last_rank, last_chunk = schedule.placement.last_rank, schedule.placement.chunk_of(schedule.placement.stages - 1)
    for program in lower(schedule):
        words, rank = texts(program), program.rank
        loads = [i.microbatch for i in program.instructions if isinstance(i, Load)]
        assert loads == (list(range(m)) if rank in (0, p - 1) else [])
        for i in loads:
            if vocab != "none":
                use = f"+TOKENS:{i}"
            elif rank == 0:
                use = f"F{i}"
            elif last_rank == rank:
                use = str(Pass(PassKind.F, i, last_chunk))
            else:
                use = next(word for word in words if word.startswith(f"+labels:{i}["))
            assert_in_order(words, f"LOAD:{i}", use)
            between = words[words.index(f"LOAD:{i}") + 1 : words.index(use)]
            assert all(word.startswith("?activation") for word in between), "the data is there before the activation"


@pytest.mark.parametrize(("name", "vocab"), [("1f1b", "vocab-1"), ("v-half", "vocab-2"), ("interleaved", "none")])
def test_a_receive_is_posted_ahead_of_the_step_during_which_its_message_is_made(name, vocab):
    schedule = generate(name, 4, 8, vocab=vocab)
    rank_of, chunk_of = schedule.placement.rank_of, schedule.placement.chunk_of
    # Programs follow times in which passes wait for the loss function, too.
    graph = build_graph(schedule, with_loss=True)
    numbers = graph.numbers(schedule.ranks)
    end = node_times(graph, numbers, durations(graph, schedule, PassCosts())).end
    orders = zip(schedule.ranks, numbers, strict=True)
    ended = [dict(zip(order, (end[number] for number in each), strict=True)) for order, each in orders]
    kinds = {"activation": PassKind.F, "gradient": PassKind.B}
    for program in lower(schedule):
        ends = ended[program.rank]
        for place, instruction in enumerate(program.instructions):
            message = getattr(instruction, "operation", None)
            if isinstance(message, Message) and message.target == program.rank and isinstance(instruction, Post):
                stage = message.source_stage
                sent = ended[rank_of(stage)][Pass(kinds[message.channel], message.microbatch, chunk_of(stage))]
                before = [ends[i.action] for i in program.instructions[:place] if isinstance(i, Run)]
                after = [ends[i.action] for i in program.instructions[place:] if isinstance(i, Run)]
                assert max(before, default=0) <= sent + 1e-9, message
                assert min(after) >= sent - 1e-9, message


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(1, 5),
    st.sampled_from(["none", "vocab-1", "vocab-2"]),
    st.sampled_from([Placement.round_robin, Placement.v_shape, lambda ranks: Placement.round_robin(ranks, 3)]),
    st.booleans(),
    st.builds(PassCosts, *[st.sampled_from([0.0, 0.5, 2.0])] * 7, comm=st.sampled_from([0.0, 1.0])),
    st.randoms(use_true_random=False),
)
def test_any_valid_order_on_any_placement_lowers_to_programs_that_end(p, m, vocab, place, split, costs, random):
    backward = (PassKind.B, PassKind.W) if split else (PassKind.B,)
    holders = random.sample(range(p), random.randint(1, p)) if vocab != "none" else ()
    # The graph needs no more than the kinds that there are, and which ranks have vocabulary passes.
    some = tuple(tuple(Pass(kind, 0) for kind in (*backward, *[PassKind.S] * (r in holders))) for r in range(p))
    schedule = Schedule("random", VocabMethod(vocab), place(p), m, some)
    graph = build_graph(schedule)
    waits = [len(before) for before in graph.predecessors]
    ready = [number for number, count in enumerate(waits) if not count]
    orders = [[] for _ in range(p)]
    while ready:
        number = ready.pop(random.randrange(len(ready)))
        if isinstance(graph.nodes[number], Step):
            orders[graph.nodes[number].rank].append(graph.nodes[number].action)
        for after in graph.successors[number]:
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    schedule = replace(schedule, ranks=tuple(map(tuple, orders)))
    for each in (schedule, schedule.forward_only()):
        validate(each, costs)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-half", "v-min", "interleaved"])
@pytest.mark.parametrize("vocab", ["none", "vocab-1", "vocab-2"])
def test_messages_join_neighbouring_stages_of_different_ranks_and_none_waits_for_w(name, vocab):
    schedule = generate(name, 3, 5, vocab=vocab)
    stages, rank_of = schedule.placement.stages, schedule.placement.rank_of
    expected = Counter()
    for stage in range(stages - 1):
        if rank_of(stage) != rank_of(stage + 1):
            expected.update({("activation", stage, stage + 1): 5, ("gradient", stage + 1, stage): 5})
    last = stages - 1
    if vocab == "none" and rank_of(last) != 2:
        expected.update({(channel, last, last): 5 for channel in ("labels", "token-loss", "token-gradient")})
    sent = Counter()
    for program in lower(schedule):
        for before, instruction in pairwise(program.instructions):
            if isinstance(instruction, Post) and isinstance(instruction.operation, Message):
                message = instruction.operation
                if message.source == program.rank:
                    sent[message.channel.value, message.source_stage, message.target_stage] += 1
                    made_by = {"labels": Load, "token-gradient": Loss}.get(message.channel, Run)
                    assert isinstance(before, made_by)
                    assert made_by is not Run or before.action.kind in (PassKind.F, PassKind.B)
            if isinstance(instruction, Run) and instruction.action.kind is PassKind.W:
                assert not isinstance(before, Wait)
    assert sent == expected


def test_interlaced_programs_run_the_parts_of_a_v_in_one_go():
    schedule = generate("interlaced", 3, 5)
    vocabulary = ("S", "LOSS", "T", "IF", "IB", "LOAD")
    for program, order in zip(lower(schedule), schedule.ranks, strict=True):
        words = texts(program)
        for i in range(5):
            assert_in_order(words, f"+C0:{i}", f"?C0:{i}", f"S{i}", f"+C1:{i}", f"?C1:{i}", f"T{i}", f"+C2:{i}")
            if program.rank == 2:
                assert_in_order(words, f"T{i}", f"?C2:{i}", f"B{i}")
        steps = [word for word in words if word[0] not in "+?"]
        assert [word for word in steps if not word.startswith(vocabulary)] == [str(s) for s in order if s.kind != "V"]
        for i in range(5):
            between = steps[steps.index(f"S{i}") + 1 : steps.index(f"T{i}")]
            assert between == ([f"LOSS:{i}"] if program.rank == 2 else [])
    evaluation = lower(schedule.forward_only())
    assert not any(word.startswith(("T", "B", "IB")) for program in evaluation for word in texts(program))


def edited(schedule, rank, edit):
    orders = [list(order) for order in schedule.ranks]
    edit(orders[rank])
    return replace(schedule, ranks=tuple(map(tuple, orders)))


def swap(first, second):
    def edit(order):
        a, b = order.index(Pass.parse(first)), order.index(Pass.parse(second))
        order[a], order[b] = order[b], order[a]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda order: order.remove(Pass.parse("S2")), "rank 1 lacks S2"),
        (lambda order: order.append(Pass.parse("B0")), "repeats B0"),
        (lambda order: order.append(Pass.parse("F9")), "must not list F9"),
        (lambda order: order.__setitem__(0, Pass.parse("F0.1")), r"lacks IF0 and must not list F0\.1"),
        (swap("F1", "B1"), "deadlock: .*B1 on rank 1 waits"),
        (swap("S0", "T0"), "deadlock: .*T0 on rank 1 waits"),
    ],
)
def test_a_broken_schedule_is_refused_where_it_breaks(edit, words):
    schedule = edited(generate("1f1b", 3, 4, vocab="vocab-1"), 1, edit)
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(schedule)
    assert len(str(caught.value)) < 2000


def test_a_long_circle_is_cut_short():
    schedule = edited(generate("interleaved", 6, 6), 0, swap("F0", "F0.1"))
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule)
    circle = str(caught.value)
    assert circle.startswith("deadlock: F0.1 on rank 0 waits for F0 on rank 5; F0 on rank 5 waits for F0 on rank 4; ")
    assert circle.count(" waits for ") == 4 and circle.endswith("; ...")


def test_a_schedule_whose_programs_hang_is_refused(monkeypatch):
    schedule = generate("1f1b", 3, 4, vocab="vocab-2")
    hanging = with_program(lower(schedule), 1, move_after("+EMBED_GRAD:2", "+EMBED_GRAD:1"))
    monkeypatch.setattr(import_module("megatron_vp.schedule.validate"), "lower", lambda *_: hanging)
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(schedule)


def with_program(programs, rank, edit):
    instructions = list(programs[rank].instructions)
    edit(instructions)
    return [replace(p, instructions=tuple(instructions)) if p.rank == rank else p for p in programs]


def place_of(instructions, text):
    return list(map(str, instructions)).index(text)


def drop(text):
    return lambda instructions: instructions.pop(place_of(instructions, text))


def move_after(text, target):
    def edit(instructions):
        moved = instructions.pop(place_of(instructions, text))
        instructions.insert(place_of(instructions, target) + 1, moved)

    return edit


def exchange(first, second):
    def edit(instructions):
        a, b = place_of(instructions, first), place_of(instructions, second)
        instructions[a], instructions[b] = instructions[b], instructions[a]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (exchange("+C2:0", "+C1:1"), r"deadlock: .*rank 1 at \+C2:0"),
        (exchange("+activation:0[1>2]", "+activation:1[1>2]"), r"deadlock: .*rank 1 at \+activation:1"),
        (drop("+C1:1"), r"deadlock: .*rank 0 at \+C1:1"),
        (drop("+EMBED:3"), r"deadlock: .*rank 0 at \+EMBED:3"),
        (drop("+activation:3[1>2]"), r"deadlock: .*rank 2 at \+activation:3"),
        (lambda i: i.insert(0, i[place_of(i, "?C1:1")]), "C1:1, which it has not posted"),
        (lambda i: i.append(i[place_of(i, "+C0:0")]), "posts C0:0 twice"),
        (lambda i: i.append(Post(Message("activation", 0, 0, 3, 0, 3))), "is not one of its members"),
        (move_after("+C0:3", "+LOSS_GRAD:2"), r"deadlock: .*rank 1 at \+C0:3"),
    ],
)
def test_a_broken_program_is_refused_where_it_breaks(edit, words):
    programs = lower(generate("1f1b", 3, 4, vocab="vocab-1"))
    validate_programs(programs)
    with pytest.raises(ScheduleError, match=words) as caught:
        validate_programs(with_program(programs, 1, edit))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 1), ("1f1b", 6), ("interleaved", 6), ("v-half", 6)])
@pytest.mark.parametrize("vocab", ["none", "vocab-1", "vocab-2"])
def test_receives_posted_early_hang_hosts_that_wait_for_their_devices(name, microbatches, vocab):
    programs = lower(generate(name, 2, microbatches, vocab=vocab))
    validate_programs(programs)
    with pytest.raises(ScheduleError, match=r"deadlock: ranks wait for each other: rank \d at \+"):
        validate_programs(with_early_receives(programs))
