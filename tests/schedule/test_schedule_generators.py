"""Generated schedules: valid for any sizes and costs, within memory, and as short as promised.

Dependencies are checked here against start and end times, written out from the table of passes, not with the graph that
the package itself uses.
"""

from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.errors import UserError
from megatron_vp.schedule import PassCosts, PassKind, VocabMethod, generate, simulate, validate

EXTRA = {"none": 0, "vocab-1": 2, "vocab-2": 1}
duration = st.sampled_from([0.0, 0.05, 0.25, 1.0, 3.0]) | st.floats(0, 4)
any_costs = st.builds(PassCosts, *[duration] * 7, comm=st.sampled_from([0.0, 0.1, 5.0]))
sharded = st.sampled_from(["vocab-1", "vocab-2"])


def assert_follows_the_table(timeline):
    schedule, comm = timeline.schedule, timeline.costs.comm
    stages, ranks = schedule.placement.stages, range(schedule.pipeline_size)
    start, end = {}, {}
    for rank, (order, spans) in enumerate(zip(schedule.ranks, timeline.spans, strict=True)):
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
        for step, span in zip(order, spans, strict=True):
            key = (step.kind.value, rank, step.microbatch, step.chunk)
            assert key not in start
            start[key], end[key] = span

    def on(kind, microbatch, stage):
        return kind, schedule.placement.rank_of(stage), microbatch, schedule.placement.chunk_of(stage)

    def everywhere(kind, microbatch):
        return [(kind, rank, microbatch, 0) for rank in ranks]

    def follows(later, earlier, latency=comm):
        for one in earlier:
            assert start[later] >= end[one] + latency - 1e-9, (later, one)

    for i in range(schedule.microbatches):
        for stage in range(1, stages):
            follows(on("F", i, stage), [on("F", i, stage - 1)])
            follows(on("B", i, stage - 1), [on("B", i, stage)])
        last_backward = on("B", i, stages - 1)
        follows(last_backward, [on("F", i, stages - 1)], 0)
        if schedule.vocab is VocabMethod.NONE:
            continue
        follows(on("F", i, 0), everywhere("IF", i))
        for rank in ranks:
            follows(("S", rank, i, 0), [on("F", i, stages - 1)])
            follows(("T", rank, i, 0), everywhere("S", i))
            follows(("IB", rank, i, 0), [on("B", i, 0)])
        follows(last_backward, everywhere("T" if schedule.vocab is VocabMethod.VOCAB_1 else "S", i))


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 16), st.integers(1, 40), sharded, any_costs)
def test_any_sizes_and_costs_give_a_valid_schedule_within_memory(p, m, vocab, costs):
    schedule = generate("1f1b", p, m, vocab=vocab, costs=costs)
    bound = [min(m, p - rank + EXTRA[vocab]) for rank in range(p)]
    timeline = validate(schedule, costs, bound)
    assert_follows_the_table(timeline)
    assert max(timeline.between_s_and_t) <= 2
    validate(schedule.forward_only(), costs)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 16), st.integers(1, 40), any_costs)
def test_plain_1f1b_is_valid_for_any_sizes_and_costs(p, m, costs):
    schedule = generate("1f1b", p, m, costs=costs)
    assert_follows_the_table(validate(schedule, costs, [min(m, p - rank) for rank in range(p)]))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 8), (7, 20)])
def test_plain_1f1b_is_the_published_order_and_takes_the_published_time(p, m):
    schedule = generate("1f1b", p, m)
    for rank, order in enumerate(schedule.ranks):
        warm_up = min(m, p - rank)
        alternating = [f"{kind}{i + shift}" for i in range(m - warm_up) for kind, shift in (("B", 0), ("F", warm_up))]
        expected = [f"F{i}" for i in range(warm_up)] + alternating + [f"B{i}" for i in range(m - warm_up, m)]
        assert list(map(str, order)) == expected
    timeline = simulate(schedule)
    assert timeline.makespan == pytest.approx(3 * (m + p - 1))
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def microbatches_around(p):
    return sorted({1, 2, p - 1, p, p + 1, 2 * p + 1, 4 * p})


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])
def test_unit_costs_reach_the_bound(p, vocab):
    costs = PassCosts()
    work = costs.F + costs.B + costs.W + costs.S + costs.T + costs.IF + costs.IB
    fill = (p - 1) * (costs.F + costs.B + costs.W) + costs.S + (costs.F if vocab == "vocab-1" else 0)
    for m in microbatches_around(p):
        assert simulate(generate("1f1b", p, m, vocab=vocab)).makespan <= m * work + fill + 1e-9, m


@pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])
def test_the_published_size_takes_no_longer_than_the_authors_order(vocab):
    assert simulate(generate("1f1b", 8, 32, vocab=vocab)).makespan <= 135.6 + 1e-9


@pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize(
    "costs", [PassCosts(), PassCosts(S=1.3, T=0.7), PassCosts(F=0.7, B=0.9, W=0.4, S=0.1)], ids=str
)
def test_one_more_microbatch_costs_its_work_and_no_more(vocab, costs):
    work = costs.F + costs.B + costs.W + costs.S + costs.T + costs.IF + costs.IB
    times = [simulate(generate("1f1b", 6, m, vocab=vocab, costs=costs), costs).makespan for m in (40, 56)]
    assert times[1] - times[0] == pytest.approx(16 * work, rel=1e-3)


def test_t_of_vocab_2_leaves_its_s_and_fills_the_cool_down():
    order = [str(step) for step in generate("1f1b", 4, 8, vocab="vocab-2").ranks[-1]]
    assert order.index("T7") > order.index("B7")


def test_the_first_stage_embeds_at_most_two_microbatches_ahead():
    order = [str(step) for step in generate("1f1b", 4, 12, vocab="vocab-2").ranks[0]]
    for i in range(2, 12):
        assert order.index(f"IF{i}") > order.index(f"F{i - 2}")


def test_a_large_schedule_is_generated_quickly():
    started = process_time()
    generate("1f1b", 32, 256, vocab="vocab-2")
    # Two seconds are promised of a machine of its own; the margin is for one that runs other tests as well.
    assert process_time() - started < 4


def test_forward_only_keeps_the_order_of_what_is_left():
    schedule = generate("1f1b", 3, 4, vocab="vocab-1")
    evaluation = schedule.forward_only()
    kept = (PassKind.IF, PassKind.F, PassKind.S)
    assert evaluation.ranks == tuple(tuple(s for s in order if s.kind in kept) for order in schedule.ranks)
    assert simulate(evaluation).peak_activation == (1, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("1f1", 4, 8), {}, "nearest is '1f1b'"),
        (("1f1b", 1, 8), {"vocab": "vocab-2"}, "pipeline size 1"),
        (("1f1b", 0, 8), {}, "pipeline size 0"),
        (("1f1b", 4, 0), {}, "0 microbatches"),
        (("1f1b", 4, 8), {"chunks": 2}, "1 chunk"),
        (("1f1b", 4, 8), {"vocab": "vocab-9"}, "vocab-9"),
        (("1f1b", 4, 8), {"vocab": "interlaced"}, "interlaced"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_reason(arguments, options, words):
    with pytest.raises(UserError, match=words):
        generate(*arguments, **options)
