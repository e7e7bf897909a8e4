"""Test orders for unequal ranks: the busiest rank sets the pace, and fill and drain cost one microbatch's way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.schedule import (
    FAMILIES,
    Channel,
    CollectiveKind,
    Load,
    Loss,
    PassCosts,
    StageCosts,
    generate,
    lower,
    simulate,
)
from megatron_vp.schedule.reorder import evaluation

SHARDED = ["vocab-1", "vocab-2"]


def costs_of(name, method, layers, rows, chunks=None):
    """Costs in units of a layer: `layers[r]` layers and `rows[r]` layers' worth of vocabulary rows on rank r.

    The layers of a rank are spread over its chunks. IF and IB take 0.01 on ranks with rows.
    """
    p, chunks = len(layers), FAMILIES[name].chunks_of(chunks)
    placement = FAMILIES[name].placement_of(p, chunks if FAMILIES[name].chunks is None else None)
    share = 1 / 3 if method == "vocab-1" else 2 / 3
    stages = [layers[placement.rank_of(stage)] / chunks / 3 for stage in range(p * chunks)]
    rest = [0.01 if each else 0.0 for each in rows]
    output = ([share * each for each in rows], [(1 - share) * each for each in rows])
    return StageCosts(*[tuple(each) for each in (stages, stages, stages, *output, rest, rest)])


def made(name, method, m, costs, layers):
    holders = [rank for rank, each in enumerate(costs.S) if each]
    return generate(name, len(layers), m, vocab=method, costs=costs, vocab_ranks=holders)


def fill_and_drain(schedule, costs, busiest):
    """The longest way of one microbatch through all passes, less what the busiest rank computes of it in its chunks.

    The first microbatch goes through the stages before the busiest rank begins, the last one back after it has ended.
    With vocab-1 B of the last stage also waits for a T, and behind the second barrier for a forward that has begun.
    """
    way = sum(costs.F) + sum(costs.B) + sum(costs.W) + max(costs.IF) + max(costs.S) + max(costs.IB)
    if schedule.vocab == "vocab-1":
        way += max(costs.T) + max(costs.F)
    return way - sum(costs.F[s] + costs.B[s] + costs.W[s] for s in schedule.placement.stage_of[busiest])


def anything(seed):
    """A family, a method, ranks with rows, and costs of any proportions, a fifth of them zero."""
    rng = random.Random(seed)
    name = rng.choice(sorted(FAMILIES))
    method = rng.choice(FAMILIES[name].methods)
    p, m = rng.randint(2, 6), rng.choice((1, 2, 5, 9, 16))
    chunks = 2 if FAMILIES[name].chunks is None else None

    def some(count):
        return tuple(float(max(0, rng.randint(-15, 60))) for _ in range(count))

    if rng.random() < 0.5:
        costs = PassCosts(*some(7), comm=rng.randint(0, 3))
    else:
        places = dict.fromkeys("FBW", p * FAMILIES[name].chunks_of(chunks))
        places |= dict.fromkeys(("S", "T", "IF", "IB") if method in SHARDED else (), p)
        costs = StageCosts(**{kind: some(count) for kind, count in places.items()})
    holders = rng.sample(range(p), rng.randint(1, p)) if method in SHARDED else None
    return name, p, m, method, chunks, costs, holders


@pytest.mark.parametrize("seed", range(40))
def test_microbatches_are_taken_and_read_in_order_whatever_the_costs(seed):
    name, p, m, method, chunks, costs, holders = anything(seed)
    trained = generate(name, p, m, vocab=method, chunks=chunks, costs=costs, vocab_ranks=holders)
    for schedule in (trained, evaluation(trained, costs)):
        for steps in schedule.ranks:
            for kind, chunk in {(step.kind, step.chunk) for step in steps if step.kind.forward}:
                order = [step.microbatch for step in steps if (step.kind, step.chunk) == (kind, chunk)]
                assert order == sorted(order), (kind, chunk)
        for rank, program in enumerate(lower(schedule, costs)):
            for action, ranks in ((Load, (0, p - 1)), (Loss, (p - 1,))):
                order = [each.microbatch for each in program.instructions if isinstance(each, action)]
                assert order == (list(range(m)) if rank in ranks else [])


def assert_paced_by_the_busiest_rank(name, job):
    method, m, layers, costs = job
    schedule = made(name, method, m, costs, layers)
    timeline = simulate(schedule, costs)
    most = max(timeline.busy)
    fill = fill_and_drain(schedule, costs, timeline.busy.index(most))
    assert timeline.makespan <= most + fill + 1e-9, (timeline.makespan - fill) / most


@st.composite
def filled(draw, name, most_ranks=8):
    """Layers that differ by up to two, and rows that fill the ranks which hold some up to one level."""
    p, m = draw(st.integers(2, most_ranks)), draw(st.integers(1, 40))
    method, level = draw(st.sampled_from(SHARDED)), draw(st.integers(3, 6))
    missing = draw(st.lists(st.integers(0, 2), min_size=p, max_size=p).filter(any))
    above = draw(st.floats(0, 0.9))
    rows = [each + above if each else draw(st.sampled_from([0.0, above])) for each in missing]
    layers = [level - each for each in missing]
    return method, m, layers, costs_of(name, method, layers, rows)


BURSTS = ("interleaved", "gis", "gis-h")
"""Families whose passes of one chunk come in bursts: behind a burst of the output layer, ranks that differ wait."""

PACED = [name for name, family in FAMILIES.items() if family.block and name not in BURSTS]
"""Families whose steady state has no bubbles at such costs."""


@pytest.mark.parametrize("name", PACED)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_ranks_filled_up_to_one_level_keep_its_pace(name, data):
    assert_paced_by_the_busiest_rank(name, data.draw(filled(name)))


COSTS = PassCosts(F=0.9, B=1.1, W=0.7, S=0.4, T=0.2, IF=0.03, IB=0.06, comm=0.01)


def alike(costs, schedule):
    """`costs`, written out for every stage, rank and link."""
    p, chunks = schedule.pipeline_size, schedule.chunks
    by_stage = [(value / chunks,) * (p * chunks) for value in (costs.F, costs.B, costs.W)]
    by_rank = [(value,) * p for value in (costs.S, costs.T, costs.IF, costs.IB)]
    links = {(a, b, channel): costs.comm for a in range(p) for b in range(p) for channel in Channel}
    v = (costs.S + costs.T + costs.IF + costs.IB,) * p
    return StageCosts(*by_stage, *by_rank, v, links, dict.fromkeys(CollectiveKind, costs.comm))


@pytest.mark.parametrize("name", FAMILIES)
def test_costs_that_are_alike_everywhere_are_pass_costs(name):
    schedule = generate(name, 4, 9, vocab=FAMILIES[name].own_method or "vocab-1", costs=COSTS)
    by_stage = alike(COSTS, schedule)
    expected, found = simulate(schedule, COSTS), simulate(schedule, by_stage)
    assert found.makespan == pytest.approx(expected.makespan)
    for one, other in zip(expected.spans, found.spans, strict=True):
        assert [moment for span in other for moment in span] == pytest.approx([t for span in one for t in span])
    nominal = by_stage.nominal(4)
    assert (nominal.F, nominal.B, nominal.W, nominal.comm) == pytest.approx((0.9, 1.1, 0.7, 0.01))
    assert pytest.approx((0.4, 0.2, 0.03, 0.06)) == (nominal.S, nominal.T, nominal.IF, nominal.IB)


def test_a_slow_link_delays_what_crosses_it_and_nothing_else():
    schedule = generate("1f1b", 3, 1)
    flat = ((1.0,) * 3,) * 3
    slow = StageCosts(*flat, messages={(1, 2, Channel.ACTIVATION): 0.5, (2, 1, Channel.ACTIVATION): 7.0})
    assert simulate(schedule, slow).makespan == pytest.approx(9.5)
