"""Test experts in Transformer Engine's own layers on the CPU: one after the other, and all in one call."""

from __future__ import annotations

import pytest

from megatron_vp.schedule import FAMILIES
from tests.mcore.comparison import assert_equal
from tests.mcore.engine import (
    APART,
    BOUND,
    FUSED,
    LLAMA,
    LTS,
    MEGATRON,
    MINIMUM,
    NEWEST,
    ONE_CALL,
    RECOMPUTED,
    SEQUENCE_PARALLEL,
    SHARDED,
    assert_checkpoint_moves,
    pipeline,
    trained,
)

IN_TURN = {**ONE_CALL, "moe_grouped_gemm": False, "disable_bias_linear": True}  # with biases Megatron itself fails
LEFT_OUT = {"num_experts": 32, "moe_router_topk": 1, "moe_router_pre_softmax": True, "seq_length": 8}
SHARED = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True, **LLAMA}
ALL_TO_ALL = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "disable_bias_linear": True}
OVER_TENSOR_RANKS = {**ALL_TO_ALL, **SEQUENCE_PARALLEL, "expert_tensor_parallel_size": 1}
ACTIVATIONS_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": "moe_act"}

# (schedule, method, fused, version, what else is asked for)
CASES = [("v-half", "vocab-2", APART, NEWEST, ONE_CALL)]
SLOW_CASES = [
    ("1f1b", "vocab-2", FUSED, NEWEST, ONE_CALL),
    ("zb-h1", None, FUSED, NEWEST, ONE_CALL),
    ("1f1b", "vocab-2", APART, NEWEST, IN_TURN),
    ("v-half", "vocab-2", FUSED, NEWEST, IN_TURN),
    ("zb-h1", None, APART, NEWEST, IN_TURN),
    ("v-half", "vocab-2", FUSED, NEWEST, {**ONE_CALL, **LEFT_OUT}),
    ("zb-h1", None, APART, NEWEST, {**ONE_CALL, **LEFT_OUT}),
    ("zb-h1", "vocab-1", FUSED, NEWEST, {**IN_TURN, **LEFT_OUT}),
    ("v-half", "vocab-2", FUSED, NEWEST, {**ONE_CALL, **SHARED}),
    ("zb-v", None, APART, NEWEST, {**IN_TURN, **SHARED}),
    ("v-half", "vocab-1", APART, NEWEST, {**ONE_CALL, **RECOMPUTED}),
    ("zb-h1", "vocab-2", FUSED, NEWEST, {**ONE_CALL, **ACTIVATIONS_RECOMPUTED}),
    ("v-half", "vocab-2", FUSED, NEWEST, {**ONE_CALL, **ALL_TO_ALL, **SHARDED}),
    ("zb-h1", None, APART, NEWEST, {**ONE_CALL, **ALL_TO_ALL, **SHARDED}),
    ("v-min", "vocab-2", FUSED, NEWEST, {**IN_TURN, **ALL_TO_ALL, **SHARDED}),
    ("zb-h1", "vocab-2", APART, NEWEST, {**ONE_CALL, **OVER_TENSOR_RANKS}),
    ("zb-h1", "vocab-2", APART, NEWEST, {**ONE_CALL, **SHARDED, "use_cpu_initialization": True}),
    ("v-half", "vocab-2", FUSED, LTS, ONE_CALL),
    ("zb-h1", None, APART, LTS, {**ONE_CALL, **LEFT_OUT}),
    ("zb-h1", "vocab-2", FUSED, MEGATRON, {**ONE_CALL, **ALL_TO_ALL, **SHARDED}),
    ("v-half", "vocab-1", APART, MEGATRON, {**ONE_CALL, **LEFT_OUT}),
    ("v-half", "vocab-2", APART, MINIMUM, ONE_CALL),
    ("zb-h1", None, FUSED, MINIMUM, {**ONE_CALL, **ALL_TO_ALL, **SHARDED}),
    ("zb-h1", "vocab-2", APART, MINIMUM, {**IN_TURN, **LEFT_OUT}),
]


def _products_of_a_layer(model: dict[str, object]) -> int:
    """Of one microbatch on one rank: two of attention, two of every expert that the rank has; without the router's."""
    experts = model["num_experts"] // model.get("expert_model_parallel_size", 1)
    return 2 + 2 * (experts + ("moe_shared_expert_intermediate_size" in model))


@pytest.mark.parametrize(
    ("schedule", "method", "fused", "version", "model"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_every_step_equals_plain_megatron_with_the_same_experts(schedule, method, fused, version, model):
    on_a_stage = 2 if model.keys() & {*SHARDED, *ALL_TO_ALL} - {"disable_bias_linear"} else 1
    plain, in_b = trained(version, on_a_stage, fused, **model)
    ours, found = trained(version, 2 * on_a_stage, fused, **pipeline(schedule, method), **model)
    assert_equal(ours, plain, BOUND)
    of_routers = 4 * 4 * 3 * model.get("tensor_model_parallel_size", 1)  # layers, microbatches, steps
    products = of_routers * _products_of_a_layer(model)
    assert sum(each.elsewhere for each in in_b) == products + of_routers and not any(each.queued for each in in_b)
    in_w = products if FAMILIES[schedule].splits_backward else 0
    assert sum(each.in_w for each in found) == sum(each.queued for each in found) == in_w
    assert sum(each.elsewhere for each in found) == products + of_routers - in_w
    assert sum(each.fused for each in found) == (in_w if fused else 0)
    assert bool(sum(each.empty for each in found)) == (in_w > 0 and model["num_experts"] == LEFT_OUT["num_experts"])
    if in_w and on_a_stage == 1:  # replicas have two microbatches each
        assert max(each.waiting for each in found) > 2 * _products_of_a_layer(model), "every W came before the next B"


@pytest.mark.slow
@pytest.mark.parametrize("experts", [ONE_CALL, IN_TURN], ids=["in one call", "in turn"])
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, experts):
    assert_checkpoint_moves(tmp_path, "v-half", "vocab-2", True, **experts)
