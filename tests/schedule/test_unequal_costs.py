"""Test orders for unequal ranks: the busiest rank sets the pace, and fill and drain cost one microbatch's way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.schedule import FAMILIES, Load, Loss, PassCosts, StageCosts, generate, lower, simulate
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


@st.composite
def random_jobs(draw, name, most_ranks=8, most_microbatches=24):
    p, m = draw(st.integers(2, most_ranks)), draw(st.integers(1, most_microbatches))
    method = draw(st.sampled_from(SHARDED))
    layers = draw(st.lists(st.integers(1, 6), min_size=p, max_size=p))
    rows = draw(st.lists(st.just(0.0) | st.floats(0.1, 6), min_size=p, max_size=p).filter(any))
    return method, m, layers, costs_of(name, method, layers, rows)


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


@pytest.mark.parametrize("seed", range(60))
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


@settings(max_examples=100, deadline=None)
@given(random_jobs("1f1b"))
def test_the_busiest_rank_sets_the_pace_of_1f1b(job):
    assert_paced_by_the_busiest_rank("1f1b", job)


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
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ranks_filled_up_to_one_level_keep_its_pace(name, data):
    assert_paced_by_the_busiest_rank(name, data.draw(filled(name)))


LAYERS, ROWS = [3, 4, 4, 3, 3, 4, 3, 4], [1.2, 0.2, 0.2, 1.2, 1.2, 0.0, 1.2, 0.2]


FAR_APART = [1, 3, 2, 3, 1, 3, 2, 1]


@pytest.mark.parametrize(
    ("name", "layers", "rows", "pace"),
    [
        *[(name, LAYERS, ROWS, 1.05) for name in BURSTS],
        *[(name, FAR_APART, [3.0 - each for each in FAR_APART], 1.2) for name in BURSTS],
        *[(name, LAYERS, ROWS, 1.001) for name in ("1f1b", "zb-v")],
        *[(name, FAR_APART, [3.0 - each for each in FAR_APART], 1.001) for name in ("1f1b", "zb-v")],
    ],
)
@pytest.mark.parametrize("method", SHARDED)
def test_bursts_of_the_output_layer_cost_some_percent_where_ranks_differ(name, layers, rows, pace, method):
    costs = costs_of(name, method, layers, rows)
    few, many = (simulate(made(name, method, m, costs, layers), costs) for m in (32, 64))
    assert (many.makespan - few.makespan) / (max(many.busy) - max(few.busy)) <= pace


@pytest.mark.parametrize("name", ["v-half", "zb-v", "interleaved"])
@pytest.mark.parametrize("method", SHARDED)
def test_an_order_for_each_rank_s_costs_is_shorter_than_one_for_their_means(name, method):
    costs = costs_of(name, method, LAYERS, ROWS)
    own = simulate(made(name, method, 32, costs, LAYERS), costs).makespan
    holders = [rank for rank, rows in enumerate(ROWS) if rows]
    means = generate(name, 8, 32, vocab=method, costs=costs.nominal(8), vocab_ranks=holders)
    assert own < 0.99 * simulate(means, costs).makespan
