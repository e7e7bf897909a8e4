"""Test the ledger of memory: passes that offload activations, defined here, change all counts of memory at once."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.layouts import equal_layers
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.ranks.rank_memory import MemoryModel
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.schedule import (
    Held,
    Pass,
    PassCosts,
    PassKind,
    Run,
    ScheduleError,
    generate,
    lower,
    simulate,
)
from megatron_vp.schedule.ledger import levels, lives, peak
from megatron_vp.schedule.list_scheduler import MemoryLimits
from megatron_vp.schedule.reorder import reorder_for_costs
from megatron_vp.schedule.validate import validate

RANKS, MICROBATCHES = 4, 8
ACTIVATIONS, HOST = Held.ACTIVATIONS, Held.HOST_ACTIVATIONS


def order(text):
    return [Pass.parse(step) for step in text.split()]


@pytest.mark.parametrize(
    ("text", "held", "expected"),
    [
        ("F0 F1 B0 B1", ACTIVATIONS, [(0, 2), (1, 3)]),
        ("F0 B0 F1 W0 B1 W1", ACTIVATIONS, [(0, 3), (2, 5)]),
        ("F0 F1 BW0 B1 W1", ACTIVATIONS, [(0, 2), (1, 4)]),
        ("F0 F0.1 B0.1 B0", ACTIVATIONS, [(0, 3), (1, 2)]),
        ("F0 S0 F1 T0 S1 B0", Held.LOGITS, [(1, 3), (4, 4)]),
        ("F0 S0 F1 S1", ACTIVATIONS, [(0, 0), (2, 2)]),
    ],
)
def test_memory_lives_until_the_last_pass_that_releases_it(text, held, expected):
    assert lives(order(text), held) == expected


def test_levels_hold_during_a_pass_what_it_takes_and_what_it_gives_back():
    assert levels(order("F0 F1 B0 W0 B1 W1"), ACTIVATIONS) == [(1, 1), (2, 2), (2, 2), (2, 1), (1, 1), (1, 0)]


def offloaded(schedule, ranks=None):
    """The activations of these ranks are on the device while a pass uses them, and at no other time.

    None: of all ranks that compute something between a forward and its backward.
    """
    if ranks is None:
        ranks = [rank for rank, steps in enumerate(schedule.ranks) if peak(steps, ACTIVATIONS) > 1]

    def around(step):
        if step.kind is PassKind.F:
            return step, step._replace(kind=PassKind.O)
        return (step._replace(kind=PassKind.R), step) if step.kind in (PassKind.B, PassKind.BW) else (step,)

    orders = [
        tuple(each for step in steps for each in around(step)) if rank in ranks else steps
        for rank, steps in enumerate(schedule.ranks)
    ]
    return replace(schedule, ranks=tuple(orders))


@pytest.fixture(params=["none", "vocab-2"])
def plain(request):
    return generate("1f1b", RANKS, MICROBATCHES, vocab=request.param)


def test_the_device_s_peak_falls_and_the_host_s_is_what_the_device_s_was(plain):
    schedule = offloaded(plain, ranks=(0, 2))
    before, after = (simulate(each).peak_activation for each in (plain, schedule))
    assert after == (1, before[1], 1, before[3])
    assert [peak(steps, HOST) for steps in schedule.ranks] == [before[0], 0, before[2], 0]
    assert all(level == 0 for steps in schedule.ranks for _, level in levels(steps, HOST)[-1:])


def test_the_validator_s_bound_holds_with_it_alone(plain):
    validate(offloaded(plain), memory_bound=[1] * RANKS)
    with pytest.raises(ScheduleError, match="holds activations of 2 microbatches at F1"):
        validate(plain, memory_bound=[1] * RANKS)


def test_a_backward_waits_until_its_activations_are_back(plain):
    schedule = offloaded(plain)
    early = list(schedule.ranks[0])
    place = early.index(Pass(PassKind.B, 0))
    early.insert(place - 1, early.pop(place))
    with pytest.raises(ScheduleError, match=r"deadlock: B0 on rank 0 waits for R0 on rank 0"):
        validate(replace(schedule, ranks=(tuple(early), *schedule.ranks[1:])))


def test_the_list_scheduler_runs_further_forwards_early_where_the_device_has_room_again(plain):
    schedule, costs = offloaded(plain), PassCosts(comm=1)
    spans = []
    for limit in (1, 2):
        found = reorder_for_costs(schedule, MemoryLimits((limit,) * RANKS), costs)
        spans.append(validate(found, costs, memory_bound=[limit] * RANKS).makespan)
    assert spans[0] <= simulate(schedule, costs).makespan and spans[1] < spans[0]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_cost_model_s_bytes_fall_by_the_microbatches_that_left(name):
    model = ModelShape(layers=8, hidden=512, heads=8, ffn=2048, vocab=8192)
    # A sequence so long that none of its tensors is too small to leave.
    job = Job(model, sequence=2**15, micro_batch=1, microbatches=MICROBATCHES, pipeline=RANKS)
    layers = equal_layers(job, RANKS)

    def activations(schedule, rank=1):
        return MemoryModel(job, schedule, layers, HARDWARE["h100"]).rank(rank).activations

    plain = generate(name, RANKS, MICROBATCHES)
    some, one_less = (activations(generate("1f1b", RANKS, MICROBATCHES), rank) for rank in (1, 2))
    peaks = [simulate(each).peak_activation[1] for each in (plain, offloaded(plain, ranks=(1,)))]
    assert peaks[0] > peaks[1] >= 1
    fell = activations(plain) - activations(offloaded(plain, ranks=(1,)))
    assert fell == pytest.approx((peaks[0] - peaks[1]) * (some - one_less))


MOVES = {"F": Store.put, "O": Store.take, "R": Store.put, "B": Store.take}


def test_the_runtime_s_count_is_held_against_it(plain):
    """What a rank's passes do with the store, and the check at the end of an iteration."""
    for before, program in zip(simulate(plain).peak_activation, lower(offloaded(plain)), strict=True):
        assert (program.peaks[ACTIVATIONS], program.peaks[HOST]) == (1, before if before > 1 else 0)
        run = [each.action for each in program.instructions if isinstance(each, Run)]
        for kinds in (set(MOVES), {"F", "B"}):
            store = Store()
            for step in run:
                if step.kind in kinds:
                    value = () if MOVES[step.kind] is Store.take else (None,)
                    MOVES[step.kind](store, Slot.CHUNK_GRAPH, step.microbatch, *value, at=step.chunk)
            store.assert_empty()
            if kinds == set(MOVES) or before == 1:
                store.assert_peaks({ACTIVATIONS: program.peaks[ACTIVATIONS]})
            else:
                with pytest.raises(AssertionError, match="held activations of"):
                    store.assert_peaks(program.peaks)
