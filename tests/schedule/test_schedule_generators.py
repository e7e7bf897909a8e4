"""Test generated schedules: valid for all sizes and costs, within memory; their order, and their refusals."""

from operator import le

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import assert_follows_the_table, assert_keeps_the_embedding_near, memory_bound

from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Pass,
    PassCosts,
    PassKind,
    VocabMethod,
    evaluation,
    generate,
    simulate,
)
from megatron_vp.schedule.ledger import peaks
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.validate import validate

METHODS = {name: [str(method) for method in family.methods] for name, family in FAMILIES.items()}

duration = st.sampled_from([0.0, 0.05, 0.25, 1.0, 3.0]) | st.floats(0, 4)
any_costs = st.builds(PassCosts, *[duration] * 7, comm=st.sampled_from([0.0, 0.1, 5.0]))
extreme_costs = st.sampled_from(
    [
        PassCosts(S=3, T=2),
        PassCosts(F=1, B=1, W=0),
        PassCosts(F=0, B=0, W=1),
        PassCosts(F=3, B=0.1, W=0.1),
        PassCosts(S=3, T=0, IF=0, IB=0),
        PassCosts(comm=5),
        PassCosts(*[0.0] * 7),
    ]
)


def check(data, name, most_ranks, most_microbatches):
    p = data.draw(st.integers(2, most_ranks), "pipeline size")
    m = data.draw(st.integers(1, most_microbatches), "microbatches")
    chunks = data.draw(st.integers(2, 4), "chunks") if FAMILIES[name].chunks is None else None
    vocab = data.draw(st.sampled_from(METHODS[name]), "vocab")
    costs = data.draw(any_costs | extreme_costs, "costs")
    schedule = generate(name, p, m, vocab=vocab, chunks=chunks, costs=costs)
    timeline = validate(schedule, costs)
    assert all(map(le, timeline.peak_activation, memory_bound(schedule)))
    assert_follows_the_table(timeline)
    assert max(peaks(schedule, Held.LOGITS)) <= 2
    if schedule.vocab.is_sharded:
        assert_keeps_the_embedding_near(schedule)
    validate(schedule.forward_only(), costs)
    validate(evaluation(schedule, costs), costs)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_any_sizes_and_costs_give_a_valid_schedule_within_memory(name, data):
    check(data, name, 16, 40)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_small_sizes_give_a_valid_schedule_within_memory(name, data):
    check(data, name, 5, 9)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [(5, 9), (16, 40)])
@settings(max_examples=6000, deadline=None)
@given(st.data())
def test_many_more_sizes_and_costs_give_a_valid_schedule_within_memory(largest, data):
    check(data, data.draw(st.sampled_from(sorted(FAMILIES)), "schedule"), *largest)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (7, 20)])
def test_plain_1f1b_is_the_published_order(p, m):
    for rank, order in enumerate(generate("1f1b", p, m).ranks):
        warm_up = min(m, p - rank)
        alternating = [f"{kind}{i + shift}" for i in range(m - warm_up) for kind, shift in (("B", 0), ("F", warm_up))]
        expected = [f"F{i}" for i in range(warm_up)] + alternating + [f"B{i}" for i in range(m - warm_up, m)]
        assert list(map(str, order)) == expected


@pytest.mark.parametrize(("p", "m", "chunks"), [(4, 4, 3), (8, 32, 2)])
def test_plain_interleaved_is_megatrons_order(p, m, chunks):
    steps = [(i, c) for group in range(0, m, p) for c in range(chunks) for i in range(group, group + p)]
    for rank, order in enumerate(generate("interleaved", p, m, chunks=chunks).ranks):
        forward = [Pass(PassKind.F, i, c) for i, c in steps]
        backward = [Pass(PassKind.B, i, chunks - 1 - c) for i, c in steps]
        warm_up = min(len(steps), 2 * (p - 1 - rank) + (chunks - 1) * p)
        alternating = [step for pair in zip(forward[warm_up:], backward, strict=False) for step in pair]
        assert list(order) == forward[:warm_up] + alternating + backward[len(steps) - warm_up :]


@pytest.mark.parametrize("name", [name for name in FAMILIES if len(METHODS[name]) > 1])
@pytest.mark.parametrize("comm", [0.0, 0.3])
def test_memory_is_used_where_it_pays_and_no_further(name, comm):
    costs = PassCosts(comm=comm)
    for p in (3, 8):
        schedule = generate(name, p, 4 * p, vocab="vocab-1", costs=costs)
        busiest = max(simulate(schedule, costs).peak_activation)
        plain = FAMILIES[name].promised_peak(p, 0, schedule.chunks, 4 * p, VocabMethod.NONE) / schedule.chunks
        assert plain <= busiest <= max(memory_bound(schedule))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("1f1", 4, 8), {}, "nearest name is '1f1b'"),
        (("1f1b", 1, 8), {"vocab": "vocab-2"}, "pipeline size 1"),
        (("1f1b", 0, 8), {}, "pipeline size 0"),
        (("interlaced", 1, 8), {}, "pipeline size 1"),
        (("1f1b", 4, 0), {}, "0 microbatches"),
        (("1f1b", 4, 8), {"chunks": 2}, "1f1b has 1 chunk per rank, got 2"),
        (("v-half", 4, 8), {"chunks": 3}, "v-half has 2 chunks per rank, got 3"),
        (("interlaced", 4, 8), {"chunks": 2}, "interlaced has 1 chunk per rank, got 2"),
        (("interleaved", 4, 8), {"chunks": 1}, "at least 2 chunks per rank, got 1"),
        (("1f1b", 4, 8), {"vocab": "vocab-9"}, "vocab-9"),
        (("1f1b", 4, 8), {"vocab": "interlaced"}, "interlaced cannot be used with schedule 1f1b"),
        (("interlaced", 4, 8), {"vocab": "vocab-1"}, "vocab-1 cannot be used with schedule interlaced"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_reason(arguments, options, words):
    with pytest.raises(UserError, match=words):
        generate(*arguments, **options)


@pytest.mark.parametrize("method", ["none", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("p", [2, 4, 7])
def test_dualpipe_v_keeps_forwards_next_to_the_backwards_that_they_overlap(method, p):
    m, barriers = 4 * p, VocabMethod(method).barriers
    schedule = generate("dualpipe-v", p, m, vocab=method, costs=PassCosts(F=1, B=1.3, W=0.8, S=0.4, comm=0.1))
    for rank, order in enumerate(schedule.ranks):
        overlapped = [step for step in order if step.kind is PassKind.BW]
        # In the paper's schedule p - 1 - r backwards of chunk 1 run alone while the pipeline fills, and those of both
        # chunks in the last p microbatches while it drains; each barrier takes one more microbatch.
        assert len(overlapped) == 2 * (m - p - barriers) - (p - 1 - rank)
        for backward in overlapped:
            forward = order[order.index(backward) - 1]
            assert forward.kind is PassKind.F and forward.chunk == 1 - backward.chunk
            assert forward.microbatch == backward.microbatch + p + barriers


def test_a_promise_counts_barriers_and_no_more_microbatches_than_there_are():
    interleaved, interlaced = FAMILIES["interleaved"], FAMILIES["interlaced"]
    assert interleaved.promised_peak(4, 0, 3, 100, VocabMethod.NONE) == 15
    assert interleaved.promised_peak(4, 0, 3, 100, VocabMethod.VOCAB_1) == 21
    assert interleaved.promised_peak(4, 0, 3, 4, VocabMethod.VOCAB_1) == 12
    assert interlaced.promised_peak(4, 1, 1, 100, VocabMethod.INTERLACED) == 5
