"""Test costs by stage, rank and link: if they are all equal, as with common costs; if not, they have an effect."""

from collections import defaultdict
from itertools import pairwise

import pytest

from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Channel,
    Collective,
    CollectiveKind,
    PassCosts,
    Simulator,
    StageCosts,
    generate,
    simulate,
)
from megatron_vp.schedule.dependencies import build_graph
from megatron_vp.schedule.list_scheduler import ListScheduler, MemoryLimits, memory_of
from megatron_vp.schedule.node_times import durations, node_times

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


def test_a_slow_last_stage_sets_the_pace_of_plain_1f1b():
    p, m, head = 4, 12, 2.0
    stages = ((1.0,) * (p - 1) + (1 + head,), (1.0,) * (p - 1) + (1 + head,), (1.0,) * p)
    timeline = simulate(generate("1f1b", p, m), StageCosts(*stages))
    assert timeline.makespan == pytest.approx(m * (3 + 2 * head) + (p - 1) * 3)
    assert timeline.busy == pytest.approx([3 * m] * (p - 1) + [(3 + 2 * head) * m])
    assert timeline.bubble_fraction == pytest.approx(1 - sum(timeline.busy) / p / timeline.makespan)


def test_a_slow_link_delays_what_crosses_it_and_nothing_else():
    schedule = generate("1f1b", 3, 1)
    flat = ((1.0,) * 3,) * 3
    slow = StageCosts(*flat, messages={(1, 2, Channel.ACTIVATION): 0.5, (2, 1, Channel.ACTIVATION): 7.0})
    assert simulate(schedule, slow).makespan == pytest.approx(9.5)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved"])
@pytest.mark.parametrize("comm", [0.02, 0.4, 3.0])
def test_a_communicator_carries_one_operation_after_another(name, comm):
    costs = PassCosts(comm=comm)
    timeline = simulate(generate(name, 4, 8, vocab="vocab-1", costs=costs), costs)
    lanes = defaultdict(list)
    for operation, span in timeline.operations.items():
        lanes[operation.lane].append(span)
    assert len(lanes) == 1 + (12 if name == "v-half" else 8 if name == "interleaved" else 6)
    for spans in lanes.values():
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(sorted(spans)))
    second_stream = lanes[("collectives",)]
    assert timeline.makespan >= sum(end - start for start, end in second_stream)


@pytest.mark.parametrize("comm", [0.0, 0.4, 3.0])
def test_orders_are_compared_and_lowered_at_the_times_that_are_simulated(comm):
    costs = PassCosts(comm=comm)
    schedule = generate("zb-v", 4, 8, vocab="vocab-1", costs=costs)
    graph = build_graph(schedule)
    simulated = node_times(graph, graph.numbers(schedule.ranks), durations(graph, schedule, costs))
    assert max(simulated.end) == pytest.approx(simulate(schedule, costs).makespan)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved"])
def test_a_list_schedule_takes_no_longer_than_it_was_found_to(name):
    costs = PassCosts(comm=1.5)
    schedule = generate(name, 4, 12, vocab="vocab-1", costs=costs)
    graph = build_graph(schedule, with_loss=True)
    took, limits = durations(graph, schedule, costs), MemoryLimits((12 * schedule.chunks,) * 4)
    given = graph.numbers(schedule.ranks)
    scheduler = ListScheduler(graph, given, took, memory_of(schedule.ranks, given), limits, {}, backwards=False)
    makespan, orders = scheduler.run()
    assert max(node_times(graph, orders, took).end) <= makespan + 1e-9


def test_a_collective_occupies_the_second_stream_of_all_ranks():
    schedule = generate("1f1b", 2, 6, vocab="vocab-2")
    rank, stage = (0.25,) * 2, (1.0,) * 2
    slow = StageCosts(stage, stage, stage, rank, rank, rank, rank, collectives={CollectiveKind.EMBED_GRAD: 10.0})
    timeline = simulate(schedule, slow)
    kinds = {operation.kind for operation in timeline.operations if isinstance(operation, Collective)}
    assert kinds == {CollectiveKind.EMBED, CollectiveKind.C0, CollectiveKind.C1, CollectiveKind.EMBED_GRAD}
    assert timeline.makespan > 60  # six gradients of ten units, and what cannot run beside them


def test_a_player_plays_one_order_against_many_costs():
    for name in ("1f1b", "zb-v", "interlaced"):
        schedule = generate(name, 4, 8, vocab="none" if name == "interlaced" else "vocab-2", costs=COSTS)
        simulator = Simulator(schedule, COSTS)
        assert simulator.simulate(COSTS) == simulate(schedule, COSTS)
        slower = PassCosts(**{key: 2 * value for key, value in COSTS.named().items()})
        assert simulator.simulate(slower).makespan == pytest.approx(2 * simulate(schedule, COSTS).makespan)
        assert simulator.simulate(COSTS).makespan == simulate(schedule, COSTS).makespan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((1.0,), (-1.0,), (1.0,)), r"B=-1 is not a valid duration"),
        (((1.0,), (1.0,), (1.0,), (float("nan"),)), r"S=nan is not a valid duration"),
    ],
)
def test_costs_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        StageCosts(*arguments)
