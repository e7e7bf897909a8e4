"""Test vocabulary parallelism combined with other features: the cases of `cases.py` against plain Megatron."""

from __future__ import annotations

from functools import cache

import pytest

from tests.harness.training import Run, comparable_model, train
from tests.mcore.case_parts import Case
from tests.mcore.cases import CASES
from tests.mcore.comparison import assert_as_close, assert_equal

BY_NAME = {case.name: case for case in CASES}
RUNS = [
    pytest.param(case.name, method, marks=pytest.mark.slow if number or case.slow else (), id=f"{case.name}-{method}")
    for case in CASES
    for number, method in enumerate(case.methods)
]


def _run(case: Case, **changes: object) -> Run:
    arguments = {
        "train_iters": 4,
        "global_batch_size": 12 * case.replicas,
        "pipeline_model_parallel_size": case.size,
    }
    return train(case.ranks, comparable_model(**arguments | dict(case.options) | changes))


@cache
def _plain(name: str) -> Run:
    return _run(BY_NAME[name])


@cache
def _exact(name: str) -> Run:
    # Megatron shares out the steps of Muon and its like between replicas in 16 bits alone.
    undistributed = {"use_distributed_optimizer": None, "overlap_param_gather": None}
    return _run(BY_NAME[name], bf16=None, fp16=None, **undistributed)


@pytest.mark.parametrize(("name", "method"), RUNS)
def test_every_step_equals_plain_megatron(name, method):
    case = BY_NAME[name]
    if case.options.get("optimizer", "sgd") != "sgd":
        pytest.importorskip("emerging_optimizers", reason="pip install emerging-optimizers")
    schedule, algorithm = method.split("/")
    in_rounds = schedule == "interleaved" and "pipeline_model_parallel_layout" not in case.options
    split = _run(
        case,
        vocab_parallel=algorithm != "none",
        vocab_parallel_algorithm=None if algorithm == "none" else algorithm,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=2 if in_rounds else None,
    )
    if case.precision:
        assert_as_close(split, _plain(name), _exact(name))
    else:
        assert_equal(split, _plain(name), case.bound)
