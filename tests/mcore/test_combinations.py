"""Test vocabulary parallelism with other features against plain Megatron: the combinations of `matrix.toml`."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_vp.schedule import generate
from tests.harness.training import Run, comparable_model, train
from tests.mcore.case_parts import ALL_TO_ALL, COMBINATIONS, PAIRS, Job, way_options
from tests.mcore.comparison import assert_as_close, assert_equal

BY_NAME = {job.name: job for job in COMBINATIONS}
RUNS = [
    pytest.param(job.name, way, marks=() if way == job.default else pytest.mark.slow, id=f"{job.name}-{way}")
    for job in COMBINATIONS
    for way in job.ways
]


def _run(job: Job, **changes: object) -> Run:
    arguments = {
        "train_iters": 2,  # the second has what the first one changed
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


def _pairs(job: Job, way: str) -> int:
    """How many pairs all ranks of a pipeline run in a step."""
    schedule, method = way.split("/")
    stages = str(job.options.get("pipeline_model_parallel_layout", "||" * job.size)).count("|") + 1
    microbatches = int(job.options.get("global_batch_size", 12 * job.replicas)) // (2 * job.replicas)
    sizes = {"vocab": method, "chunks": max(2, stages // job.size)}
    return sum(map(len, generate(schedule, job.size, microbatches, overlapped=True, **sizes).pairs))


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_every_step_equals_plain_megatron(name, way):
    job = BY_NAME[name]
    if job.options.get("optimizer", "sgd") != "sgd":
        pytest.importorskip("emerging_optimizers", reason="pip install emerging-optimizers")
    split = _run(job, **way_options(way, **job.options), **job.ours)
    if "overlap_moe_expert_parallel_comm" in job.ours:
        assert len(split.pairs) == len(split.steps) * job.ranks // job.size * _pairs(job, way)
    if job.precision:
        assert_as_close(split, _plain(name), _exact(name))
    else:
        assert_equal(split, _plain(name), job.bound)


@pytest.mark.slow
def test_pairs_issue_the_nodes_of_plain_megatrons_pairs_in_the_same_order():
    options = {**ALL_TO_ALL, **PAIRS, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    plain, ours = (
        train(4, comparable_model(**{**options, "global_batch_size": 16, "train_iters": 2, **more}))
        for more in ({}, {"pipeline_schedule": "interleaved"})
    )
    assert len(ours.pairs) == len(plain.pairs) > 0
    assert {tuple(nodes) for nodes in ours.pairs} == {tuple(nodes) for nodes in plain.pairs}
