"""Transformer Engine's own layers on the CPU, in fp32: the Python of its wheel, PyTorch in the place of its kernels."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_vp.mcore.options.choices import SPLIT_SCHEDULES
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, tiny_model
from tests.mcore.comparison import assert_equal
from tests.mcore.engine import MODEL, Products, engine_case, require

BOUND = 1e-6
NEWEST, BETWEEN, MINIMUM = "2.20.2", "2.14.1", "2.8.0"


@cache
def _trained(
    version: str, world_size: int, fused: bool, same_weights: bool = True, **changes: object
) -> tuple[Run, list[Products]]:
    arguments = tiny_model(**MODEL | changes)
    ranks = run_ranks(world_size, engine_case, require(version), arguments, fused, same_weights, timeout=240)
    return _merge([run for run, _ in ranks]), [products for _, products in ranks]


SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 10000,
}
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}
SEQUENCE_PARALLEL = {**TENSOR_PARALLEL, "sequence_parallel": True}
LLAMA = {
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FUSED, APART = True, False
WEIGHTS = 4 * 4 * 4 * 3
"""Products of a run: four a layer, in four layers, of four microbatches a step, in three steps."""

# (schedule, method, fused, version, what else is asked for)
CASES = [
    ("zb-h1", "vocab-2", FUSED, NEWEST, {}),
    ("v-half", "vocab-1", APART, NEWEST, {}),
]
SLOW_CASES = [
    ("1f1b", "vocab-2", FUSED, NEWEST, {}),
    ("zb-h1", None, APART, NEWEST, {}),
    ("v-half", None, FUSED, NEWEST, {}),
    ("zb-v", None, FUSED, NEWEST, LLAMA),
    ("zb-h1", "vocab-2", APART, NEWEST, LLAMA),
    ("zb-h1", "vocab-2", FUSED, NEWEST, RECOMPUTED),
    ("v-half", "vocab-1", FUSED, NEWEST, {"recompute_granularity": "selective"}),
    ("zb-h1", "vocab-2", APART, NEWEST, TENSOR_PARALLEL),
    ("zb-h1", "vocab-2", FUSED, NEWEST, SEQUENCE_PARALLEL),
    ("v-min", "vocab-2", FUSED, NEWEST, SHARDED),
    ("zb-h1", "vocab-2", APART, NEWEST, {**SHARDED, "use_cpu_initialization": True}),
    ("zb-h1", "vocab-2", FUSED, MINIMUM, {}),
    ("v-half", "vocab-1", APART, MINIMUM, SHARDED),
    ("zb-h1", "vocab-2", APART, BETWEEN, SEQUENCE_PARALLEL),
    ("v-half", "vocab-1", FUSED, BETWEEN, LLAMA),
]


def _pipeline(schedule: str, method: str | None) -> dict[str, object]:
    return {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": schedule,
        "vocab_parallel": method is not None,
        "vocab_parallel_algorithm": method,
    }


@pytest.mark.parametrize(
    ("schedule", "method", "fused", "version", "model"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_every_step_equals_plain_megatron_with_the_same_layers(schedule, method, fused, version, model):
    on_a_stage = 2 if model.keys() & {*SHARDED, *TENSOR_PARALLEL} else 1
    plain, in_b = _trained(version, on_a_stage, fused, **model)
    ours, found = _trained(version, 2 * on_a_stage, fused, **_pipeline(schedule, method), **model)
    assert_equal(ours, plain, BOUND)
    products = WEIGHTS * model.get("tensor_model_parallel_size", 1)
    assert sum(each.elsewhere for each in in_b) == products and not any(each.queued for each in in_b)
    in_w = products if schedule in SPLIT_SCHEDULES else 0
    assert sum(each.in_w for each in found) == sum(each.queued for each in found) == in_w
    assert sum(each.elsewhere for each in found) == products - in_w
    assert sum(each.fused for each in found) == (in_w if fused else 0)
    if in_w and model.keys().isdisjoint(SHARDED):  # whose replicas have two microbatches each
        assert max(each.waiting for each in found) > 2 * 4, "on no rank did a W come after a later microbatch's B"


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole optimizer", "distributed optimizer"])
@pytest.mark.parametrize(("schedule", "method"), [("1f1b", "vocab-2"), ("zb-h1", "vocab-2"), ("v-half", "vocab-1")])
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, schedule, method, sharded):
    common = {"eval_iters": 0, "train_iters": 4, "use_distributed_optimizer": sharded}
    saved = {**common, "save": tmp_path, "dist_ckpt_optim_fully_reshardable": sharded}
    split, resumed = _pipeline(schedule, method), {"same_weights": False, "load": tmp_path}
    runs = [
        _trained(NEWEST, 2, FUSED, **split, **saved, save_interval=2, exit_interval=2),
        _trained(NEWEST, 1, FUSED, **saved, **resumed, save_interval=3, exit_interval=3),
        _trained(NEWEST, 2, FUSED, **split, **common, **resumed),
    ]
    unmoved, _ = _trained(NEWEST, 1, FUSED, **common)
    steps = [step for run, _ in runs for step in run.steps]
    assert [step.loss for step in steps] == pytest.approx(unmoved.losses, rel=BOUND)
    assert [step.grad_norm for step in steps] == pytest.approx(unmoved.grad_norms, rel=BOUND)
