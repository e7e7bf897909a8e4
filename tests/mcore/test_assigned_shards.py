"""Test vocabulary shards of any size against plain Megatron: losses and all gradients of every step, in fp32."""

from __future__ import annotations

import pytest

from tests.harness.training import comparable_model, train
from tests.mcore.assigned_shards import BY_DEFAULT, CHOSEN, RANDOM, SCHEDULES, VOCABULARY
from tests.mcore.case_parts import FP32
from tests.mcore.comparison import assert_equal

CASES = [
    *(pytest.param(case, id=str(case)) for case in BY_DEFAULT),
    *(
        pytest.param(case, id=f"{case} #{number}", marks=pytest.mark.slow)
        for number, case in enumerate(CHOSEN + RANDOM)
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_plain_megatron(case):
    plain = train(case.ranks, comparable_model(**case.common))
    ours = train(case.ranks, comparable_model(**case.common, **case.ours))
    assert_equal(ours, plain, FP32)


def test_the_random_ones_cover_schedules_methods_and_ranks_without_rows():
    assert {(case.schedule, case.method) for case in RANDOM} == {
        (schedule, method) for schedule in SCHEDULES for method in ("vocab-1", "vocab-2")
    }
    for case in (*BY_DEFAULT, *CHOSEN, *RANDOM):
        assert sum(case.rows) == VOCABULARY and case.ranks <= 8
    without_rows = [case for case in RANDOM if 0 in case.rows]
    assert len(without_rows) >= len(RANDOM) // 3
    assert {0 in (case.rows[0], case.rows[-1]) for case in without_rows} == {False, True}
    for name in ("tied", "tensor", "data"):
        assert len({getattr(case, name) for case in without_rows}) == 2, name
