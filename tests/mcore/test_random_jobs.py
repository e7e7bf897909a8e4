"""Test random jobs: every step equals plain Megatron's, for any combination of options."""

from __future__ import annotations

import pytest

from tests.harness.training import comparable_model, train
from tests.mcore.comparison import assert_equal
from tests.mcore.random_jobs import random_job

JOBS = 80
NO_GRADIENT = "k_layernorm.bias"
"""Adds the same to all scores of a query: its gradient is zero, and what is found is rounding."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(JOBS))
def test_every_step_equals_plain_megatron(number):
    job = random_job(number)
    plain = train(job.ranks, comparable_model(**job.options), masked=job.masked)
    found = train(job.ranks, comparable_model(**job.options, **job.ours), masked=job.masked)
    for step in (*plain.steps, *found.steps):
        step.gradients = {name: value for name, value in step.gradients.items() if not name.endswith(NO_GRADIENT)}
    assert_equal(found, plain, job.bound)


def test_a_number_gives_one_job_and_all_schedules_occur():
    jobs = [random_job(number) for number in range(JOBS)]
    assert jobs == [random_job(number) for number in range(JOBS)]
    found = {(job.schedule, job.ours["vocab_parallel_algorithm"]) for job in jobs}
    assert len(found) == 19
