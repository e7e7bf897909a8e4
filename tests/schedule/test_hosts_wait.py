"""Test that programs complete even if hosts wait for their devices, and that early receives would deadlock."""

import pytest

from megatron_vp.schedule import (
    FAMILIES,
    PassCosts,
    evaluation,
    generate,
    lower,
    programs_to_json,
)
from tests.schedule.early_receives import with_early_receives
from tests.schedule.program_player import HostWaits, stuck_ranks

WAITS = list(HostWaits)
JOBS = [(name, str(method)) for name, family in FAMILIES.items() for method in family.methods]


def assert_ends(schedule, costs=None):
    text = programs_to_json(schedule, lower(schedule, costs))
    for waits in WAITS:
        assert not stuck_ranks(text, waits), (schedule.name, schedule.vocab, schedule.pipeline_size, waits)


def both(name, method, p, m, costs):
    """What training and what evaluation run."""
    schedule = generate(name, p, m, vocab=method, costs=costs)
    return schedule, evaluation(schedule, costs)


@pytest.mark.parametrize(("name", "method"), JOBS)
def test_training_and_evaluation_end(name, method):
    for schedule in both(name, method, 3, 7, PassCosts()):
        assert_ends(schedule)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_early_receives_they_hang_where_hosts_wait_and_only_there(name):
    schedule = generate(name, 4, 6)
    text = programs_to_json(schedule, with_early_receives(lower(schedule)))
    assert [bool(stuck_ranks(text, waits)) for waits in WAITS] == [waits is not HostWaits.NEVER for waits in WAITS]
