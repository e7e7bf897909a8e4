"""Test that programs complete even if hosts wait for their devices, and that early receives would deadlock."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.schedule import (
    FAMILIES,
    PassCosts,
    evaluation,
    generate,
    lower,
    programs_to_json,
)
from megatron_vp.schedule.validate import validate
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
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 7), (4, 4)])
def test_training_and_evaluation_end(name, method, p, m):
    for schedule in both(name, method, p, m, PassCosts()):
        assert_ends(schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), JOBS)
def test_training_and_evaluation_end_at_every_size(name, method):
    for p, m in product(range(2, 9), range(1, 25)):
        for schedule in both(name, method, p, m, PassCosts()):
            assert_ends(schedule)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(JOBS),
    st.integers(2, 8),
    st.integers(1, 12),
    st.builds(PassCosts, *[st.floats(0, 3)] * 7, comm=st.sampled_from([0.0, 0.1, 1.0])),
)
def test_training_and_evaluation_end_at_any_costs(job, p, m, costs):
    for schedule in both(*job, p, m, costs):
        validate(schedule, costs)
        assert_ends(schedule, costs)


@pytest.mark.parametrize(("name", "method"), JOBS)
@pytest.mark.parametrize("waits", [HostWaits.AROUND_PASSES, HostWaits.ALWAYS], ids=lambda waits: waits.name)
def test_with_early_receives_they_hang_where_hosts_wait_and_only_there(name, method, waits):
    schedule = generate(name, 4, 6, vocab=method)
    text = programs_to_json(schedule, with_early_receives(lower(schedule)))
    assert not stuck_ranks(text, HostWaits.NEVER)
    assert stuck_ranks(text, waits)
