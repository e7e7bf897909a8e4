"""Test schedules in which only some ranks hold vocabulary rows: passes, collectives, files, evaluation, refusals."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Collective,
    CollectiveKind,
    Loss,
    Pass,
    PassKind,
    Placement,
    Post,
    Run,
    Schedule,
    ScheduleError,
    ScheduleRequest,
    StageCosts,
    VocabMethod,
    Wait,
    evaluation,
    family,
    from_csv,
    from_json,
    generate,
    lower,
    programs_to_json,
    simulate,
    to_csv,
    to_json,
)
from megatron_vp.schedule.dependencies import build_graph
from megatron_vp.schedule.graph import Step
from megatron_vp.schedule.ledger import peaks
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.validate import validate, validate_programs
from tests.schedule.program_player import HostWaits, stuck_ranks
from tests.schedule.schedule_checks import memory_bound

JOBS = [(name, str(method)) for name, each in FAMILIES.items() for method in each.methods if method.is_sharded]
VOCABULARY = {"IF", "S", "T", "IB"}


@st.composite
def random_jobs(draw, most_ranks=8, most_microbatches=12):
    """A job: family, method, ranks, microbatches, chunks, the ranks with rows, and costs by stage and rank."""
    name, method = draw(st.sampled_from(JOBS))
    p, m = draw(st.integers(2, most_ranks)), draw(st.integers(1, most_microbatches))
    chunks = draw(st.integers(2, 3)) if FAMILIES[name].chunks is None else None
    holders = tuple(sorted(draw(st.sets(st.integers(0, p - 1), min_size=1))))
    stages = p * FAMILIES[name].chunks_of(chunks)
    duration = st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0]) | st.floats(0, 4)
    by_stage = [tuple(draw(st.lists(duration, min_size=stages, max_size=stages))) for _ in range(3)]
    rows = [draw(duration) if rank in holders else 0.0 for rank in range(p)]
    by_rank = [tuple(share * each for each in rows) for share in (1.0, draw(st.floats(0, 2)), 0.1, 0.1)]
    collectives = dict.fromkeys(CollectiveKind, draw(st.sampled_from([0.0, 0.1, 2.0])))
    return name, method, p, m, chunks, holders, StageCosts(*by_stage, *by_rank, collectives=collectives)


def made(job):
    name, method, p, m, chunks, holders, costs = job
    return generate(name, p, m, vocab=method, chunks=chunks, costs=costs, vocab_ranks=holders)


def members_of(schedule, holders):
    """Written out: holders, readers of data, first and last stage."""
    stage_of = dict(enumerate(schedule.placement.stage_of))
    last = schedule.pipeline_size * schedule.chunks - 1
    ends = {rank for rank, stages in stage_of.items() if 0 in stages or last in stages}
    return sorted({*holders, *ends, 0, schedule.pipeline_size - 1})


def assert_runs(schedule, holders, costs):
    """Every microbatch has each vocabulary pass once on holders alone, and the programs end on every kind of device."""
    m, p = schedule.microbatches, schedule.pipeline_size
    members = members_of(schedule, holders)
    assert schedule.vocab_ranks == holders and list(schedule.vocab_members) == members
    kinds = VOCABULARY if schedule.has_backward else {"IF", "S"}
    collectives = {"TOKENS", "EMBED", "C0", "C1"}
    if schedule.has_backward:
        collectives |= {"LOSS_GRAD", "EMBED_GRAD"} | ({"C2"} if schedule.vocab is VocabMethod.VOCAB_1 else set())
    validate(schedule, costs)
    steps = Counter((node.rank, node.action) for node in build_graph(schedule).nodes if isinstance(node, Step))
    assert steps == Counter((rank, step) for rank, order in enumerate(schedule.ranks) for step in order)
    for ahead in (False, True):
        programs = lower(schedule, costs, mtp_stage=schedule.placement.stages - 1 if ahead else None)
        validate_programs(programs)
        for rank, program in enumerate(programs):
            runs = Counter(step.action.kind.value for step in program.instructions if isinstance(step, Run))
            assert {kind: runs[kind] for kind in VOCABULARY} == {
                kind: m if rank in holders and kind in kinds else 0 for kind in VOCABULARY
            }
            posted = Counter(
                step.operation.kind.value
                for step in program.instructions
                if isinstance(step, Post) and isinstance(step.operation, Collective)
            )
            assert posted == (dict.fromkeys(collectives, m) if rank in members else {})
            assert sum(isinstance(step, Loss) for step in program.instructions) == (m if rank == p - 1 else 0)
        text = programs_to_json(schedule, programs)
        for waits in HostWaits:
            assert not stuck_ranks(text, waits), waits
        for program in json.loads(text)["programs"]:
            assert all(each["members"] == members for each in program if each.get("lane") == "collectives")


@settings(max_examples=30, deadline=None)
@given(random_jobs())
def test_random_ranks_train_and_evaluate_within_memory(job):
    _, _, p, _, _, holders, costs = job
    schedule = made(job)
    assert_runs(schedule, holders, costs)
    assert_runs(evaluation(schedule, costs), holders, costs)
    timeline = simulate(schedule, costs)
    bound = memory_bound(schedule)
    for rank in range(p):
        assert timeline.peak_activation[rank] <= bound[rank] + 1e-9
        assert peaks(schedule, Held.LOGITS)[rank] <= (2 if rank in holders else 0)


@settings(max_examples=40, deadline=None)
@given(random_jobs(5, 6))
def test_files_of_random_ranks_read_back(job):
    schedule = made(job)
    timeline = simulate(schedule, job[-1])
    for again in (from_json(to_json(schedule, timeline)), from_csv(to_csv(schedule))):
        assert replace(again, name=schedule.name) == schedule and again.vocab_ranks == job[5]


@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_a_rank_without_rows_that_receives_rows_waits_for_their_token_ids_first(method):
    for ahead in (False, True):
        schedule = generate("1f1b", 3, 4, vocab=method, vocab_ranks=(1,))
        first, middle, last = lower(schedule, mtp_stage=2 if ahead else None)
        for program in (first, middle, last):
            words = [str(each) for each in program.instructions]
            for i in range(4):
                uses = program is not last or ahead
                assert (f"?TOKENS:{i}" in words) == uses
                if uses:
                    assert words.index(f"+TOKENS:{i}") < words.index(f"?TOKENS:{i}") < words.index(f"+EMBED:{i}")
                assert words.count(f"?TOKENS:{i}") == int(uses)


def test_members_are_holders_readers_and_both_ends():
    placement = Placement(((1,), (0,), (4,), (3,), (2,)))
    assert placement.vocab_members((1,)) == (0, 1, 2, 4)
    assert placement.vocab_members((3,)) == (0, 1, 2, 3, 4)
    assert Placement.v_shape(4).vocab_members(()) == (0, 3)
    assert generate("1f1b", 4, 2).vocab_members == ()
    assert generate("interlaced", 4, 2).vocab_members == (0, 1, 2, 3)


def by_hand(*ranks, method=VocabMethod.VOCAB_2):
    orders = tuple(tuple(map(Pass.parse, line.split())) for line in ranks)
    return Schedule("by hand", method, Placement.round_robin(len(ranks)), 1, orders)


def test_a_schedule_by_hand_may_leave_ranks_without_vocabulary_passes():
    schedule = by_hand("F0 B0", "IF0 F0 S0 B0 T0 IB0", "F0 B0")
    validate(schedule)
    assert schedule.vocab_ranks == (1,)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (("F0 B0", "F0 S0 B0 T0 IB0"), r"^rank 1 lacks IF0 \(by hand, vocab-2\)$"),
        (("F0 B0 IB0", "IF0 F0 S0 B0 T0 IB0"), r"^rank 0 lacks IF0 S0 T0 \(by hand, vocab-2\)$"),
        (("F0 B0", "F0 B0"), r"^no rank has vocabulary passes, but vocab-2 needs IF, S, T, IB on at least one"),
    ],
)
def test_a_part_of_the_vocabulary_passes_is_refused(ranks, words):
    with pytest.raises(ScheduleError, match=words):
        validate(by_hand(*ranks))


@pytest.mark.parametrize(
    ("name", "vocab", "ranks", "words"),
    [
        ("1f1b", "vocab-2", (), "rows on ranks none cannot be used"),
        (
            "v-half",
            "vocab-1",
            (2, 2),
            "ranks 2, 2 cannot be used",
        ),
        ("1f1b", "none", (1,), "rows on ranks 1 cannot be used with schedule 1f1b and vocab method none"),
        ("interlaced", "interlaced", (1, 2), "which have vocabulary passes on ranks 0, 1, 2, 3;"),
    ],
)
def test_ranks_that_cannot_hold_rows_are_refused(name, vocab, ranks, words):
    with pytest.raises(UserError, match=words):
        generate(name, 4, 8, vocab=vocab, vocab_ranks=ranks)
    assert generate("interlaced", 4, 8, vocab_ranks=range(4)) == generate("interlaced", 4, 8)


def test_a_file_says_which_ranks_hold_rows(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(to_json(generate("1f1b", 4, 6, vocab="vocab-1", vocab_ranks=(0, 3))))
    record = family(str(path))
    for ranks in (None, (0, 3), (3, 0)):
        request = ScheduleRequest.of(record, 4, 6, method=VocabMethod.VOCAB_1, vocab_ranks=ranks)
        assert request.schedule().vocab_ranks == (0, 3)
        assert replace(request, microbatches=9, forward_only=True).schedule().vocab_ranks == (0, 3)
    for forward_only in (False, True):
        with pytest.raises(UserError, match=r"ranks 1 cannot be used with schedule .*, which have .* on ranks 0, 3;"):
            ScheduleRequest.of(record, 4, 6, vocab_ranks=(1,), forward_only=forward_only)


def _embeds(program):
    """The instructions of a rank that wait for embedded rows or run a forward, in order."""
    for instruction in program.instructions:
        if isinstance(instruction, Wait) and isinstance(instruction.operation, Collective):
            if instruction.operation.kind is CollectiveKind.EMBED:
                yield "rows", instruction.operation.microbatch
        elif isinstance(instruction, Run) and instruction.action.kind is PassKind.F:
            yield "forward", instruction.action.microbatch


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half"])
@pytest.mark.parametrize("method", [VocabMethod.VOCAB_1, VocabMethod.VOCAB_2])
@pytest.mark.parametrize(("size", "microbatches"), [(2, 1), (3, 4), (4, 16)])
@pytest.mark.parametrize("behind", [0, 1])
def test_the_forward_of_further_predictions_waits_for_its_rows(name, method, size, microbatches, behind):
    """The stage of multi-token prediction is the last, or has one stage behind it."""
    schedule = generate(name, size, microbatches, vocab=method)
    mtp_stage = max(1, schedule.placement.stages - 1 - behind)
    programs = lower(schedule, mtp_stage=mtp_stage)
    validate_programs(programs)
    first, last = schedule.placement.first_rank, schedule.placement.rank_of(mtp_stage)
    for program in programs:
        steps = list(_embeds(program))
        waits = [microbatch for step, microbatch in steps if step == "rows"]
        assert sorted(waits) == (list(range(microbatches)) if program.rank in (first, last) else [])
        for microbatch in waits:
            forwards = [place for place, step in enumerate(steps) if step == ("forward", microbatch)]
            place = steps.index(("rows", microbatch))
            # On one rank both ends share the wait; else the last chunk's forward is the rank's last of a microbatch.
            assert place < (forwards[0] if program.rank == first else forwards[-1])
