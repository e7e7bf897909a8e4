"""Test vocabulary parallelism with other features against plain Megatron: the combinations of `matrix.toml`."""

from __future__ import annotations

from functools import cache

import pytest

from tests.harness.training import Run, comparable_model, train
from tests.mcore.case_parts import COMBINATIONS, Job, way_options
from tests.mcore.comparison import assert_as_close, assert_equal

BY_NAME = {job.name: job for job in COMBINATIONS}
RUNS = [
    pytest.param(job.name, way, marks=() if way == job.default else pytest.mark.slow, id=f"{job.name}-{way}")
    for job in COMBINATIONS
    for way in job.ways
]


def _run(job: Job, **changes: object) -> Run:
    arguments = {
        "train_iters": 4,
        "global_batch_size": 12 * job.replicas,
        "pipeline_model_parallel_size": job.size,
    }
    return train(job.ranks, comparable_model(**arguments | dict(job.options) | changes))


@cache
def _plain(name: str) -> Run:
    return _run(BY_NAME[name])


@cache
def _exact(name: str) -> Run:
    # Megatron shares out the steps of Muon and its like between replicas in 16 bits alone.
    undistributed = {"use_distributed_optimizer": None, "overlap_param_gather": None}
    return _run(BY_NAME[name], bf16=None, fp16=None, **undistributed)


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_every_step_equals_plain_megatron(name, way):
    job = BY_NAME[name]
    if job.options.get("optimizer", "sgd") != "sgd":
        pytest.importorskip("emerging_optimizers", reason="pip install emerging-optimizers")
    split = _run(job, **way_options(way, **job.options), **job.ours)
    if job.precision:
        assert_as_close(split, _plain(name), _exact(name))
    else:
        assert_equal(split, _plain(name), job.bound)
