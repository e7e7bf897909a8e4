"""Test the ledger of memory: passes that offload activations, defined here, change all counts of memory at once."""

from dataclasses import replace

import pytest

from megatron_vp.runtime.store import Slot, Store
from megatron_vp.schedule import (
    Held,
    Pass,
    PassKind,
    Run,
    generate,
    lower,
    simulate,
)
from megatron_vp.schedule.ledger import lives, peak

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
