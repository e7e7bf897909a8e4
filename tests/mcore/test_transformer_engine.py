"""Test Transformer Engine's own layers on CPU, dense and with experts: the Python code of its wheel, with PyTorch for
its kernels.
"""

from __future__ import annotations

from itertools import product

import pytest

from megatron_vp.schedule import FAMILIES
from tests.mcore.case_parts import LATENT, PAIRS
from tests.mcore.comparison import assert_as_close, assert_equal, largest_distance
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
    TENSOR_PARALLEL,
    assert_checkpoint_moves,
    pipeline,
    trained,
)

slow = pytest.mark.slow
LAYERS = 4 * 4 * 3
"""Layers that a run computes: four, of four microbatches per step, in three steps."""
BY_PARTS = {**LATENT, "core_attention": None}
IN_TURN = {**ONE_CALL, "moe_grouped_gemm": False, "disable_bias_linear": True}  # with biases Megatron itself fails
LEFT_OUT = {"num_experts": 32, "moe_router_topk": 1, "moe_router_pre_softmax": True, "seq_length": 8}
SHARED = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True, **LLAMA}
ALL_TO_ALL = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "disable_bias_linear": True}
OVER_TENSOR_RANKS = {**ALL_TO_ALL, **SEQUENCE_PARALLEL, "expert_tensor_parallel_size": 1}
ACTIVATIONS_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": "moe_act"}

# (schedule, method, fused, version, what else is asked for); the first one runs by default.
CASES = [
    ("zb-h1", "vocab-2", FUSED, NEWEST, {}),
    ("zb-v", None, FUSED, NEWEST, {**LLAMA, "recompute_granularity": "selective"}),
    ("1f1b", "vocab-2", FUSED, NEWEST, {**RECOMPUTED, **TENSOR_PARALLEL}),
    ("zb-h1", "vocab-2", APART, NEWEST, {**SHARDED, "use_cpu_initialization": True}),
    ("v-half", "vocab-1", APART, MINIMUM, SHARDED),
    ("zb-h1", "vocab-2", APART, LTS, SEQUENCE_PARALLEL),
    ("zb-h1", "vocab-1", APART, MEGATRON, {**BY_PARTS, **SEQUENCE_PARALLEL}),
]
WITH_EXPERTS = [
    ("v-half", "vocab-2", APART, NEWEST, ONE_CALL),
    ("zb-h1", "vocab-1", FUSED, NEWEST, {**IN_TURN, **LEFT_OUT}),
    ("zb-v", None, APART, NEWEST, {**IN_TURN, **SHARED}),
    ("v-half", "vocab-1", APART, NEWEST, {**ONE_CALL, **RECOMPUTED}),
    ("zb-h1", "vocab-2", FUSED, NEWEST, {**ONE_CALL, **ACTIVATIONS_RECOMPUTED}),
    ("v-min", "vocab-2", FUSED, NEWEST, {**IN_TURN, **ALL_TO_ALL, **SHARDED}),
    ("zb-h1", "vocab-2", APART, NEWEST, {**ONE_CALL, **OVER_TENSOR_RANKS}),
    ("zb-h1", "vocab-2", APART, MINIMUM, {**IN_TURN, **LEFT_OUT}),
]


def first_by_default(cases: list[tuple]) -> list[object]:
    return [cases[0], *(pytest.param(*case, marks=slow) for case in cases[1:])]


def _on_a_stage(model: dict[str, object]) -> int:
    more = {*SHARDED, *ALL_TO_ALL, *TENSOR_PARALLEL} - {"disable_bias_linear"}
    return 2 if model.keys() & more else 1


def _products(model: dict[str, object]) -> int:
    """Of a layer, one microbatch and one rank: queries, keys and values in one or in four, what leaves attention, and
    two of the MLP or of every expert that the rank has; without the router's.
    """
    attention = 5 if model.get("multi_latent_attention") else 2
    experts = model.get("num_experts", 1) // model.get("expert_model_parallel_size", 1)
    return attention + 2 * (experts + ("moe_shared_expert_intermediate_size" in model))


@pytest.mark.parametrize(
    ("schedule", "method", "fused", "version", "model"), [*first_by_default(CASES), *first_by_default(WITH_EXPERTS)]
)
def test_every_step_equals_plain_megatron_with_the_same_layers(schedule, method, fused, version, model):
    on_a_stage = _on_a_stage(model)
    plain, in_b = trained(version, on_a_stage, fused, **model)
    ours, found = trained(version, 2 * on_a_stage, fused, **pipeline(schedule, method), **model)
    assert_equal(ours, plain, BOUND)
    layers = LAYERS * model.get("tensor_model_parallel_size", 1)
    products, of_routers = layers * _products(model), layers if "num_experts" in model else 0
    assert sum(each.elsewhere for each in in_b) == products + of_routers and not any(each.queued for each in in_b)
    in_w = products if FAMILIES[schedule].splits_backward else 0
    assert sum(each.in_w for each in found) == sum(each.queued for each in found) == in_w
    assert sum(each.elsewhere for each in found) == products + of_routers - in_w
    assert sum(each.fused for each in found) == (in_w if fused else 0)
    assert bool(sum(each.empty for each in found)) == (in_w > 0 and model.get("num_experts") == LEFT_OUT["num_experts"])
    if in_w and model.keys().isdisjoint({*SHARDED, "expert_model_parallel_size"}):  # replicas have two microbatches
        assert max(each.waiting for each in found) > 2 * _products(model), "every W came before a later B"


@slow
@pytest.mark.parametrize(("schedule", "delayed"), [("interleaved", True), ("dualpipe-v", False)])
def test_pairs_delay_the_weight_gradients_of_the_same_layers(schedule, delayed):
    model = {**ONE_CALL, **ALL_TO_ALL, "global_batch_size": 16}
    plain, _ = trained(NEWEST, 2, FUSED, **model)
    given = {**pipeline(schedule, "vocab-2"), **PAIRS, "delay_wgrad_compute": delayed}
    ours, found = trained(NEWEST, 4, FUSED, **given, **model)
    assert_equal(ours, plain, BOUND)
    assert ours.pairs and all(each.queued for each in found)


ONE_ROUNDING = 2.0**-8
"""To bf16, relative."""
IN_16_BITS = [
    ("zb-h1", None, FUSED, MINIMUM, {}),
    ("zb-h1", "vocab-2", FUSED, MEGATRON, {}),
    ("v-min", None, FUSED, NEWEST, SEQUENCE_PARALLEL),
]


@slow
@pytest.mark.parametrize(("schedule", "method", "fused", "version", "model"), IN_16_BITS)
def test_in_16_bits_a_split_backward_rounds_as_plain_megatron(schedule, method, fused, version, model):
    """Without vocabulary passes gradients are one rounding apart at most, and losses as close as in fp32.

    W adds the gradient of a bias that Transformer Engine makes in its GEMM to `main_grad` as it is, where autograd
    rounds it to 16 bits first. Local layers on a CPU round a product before W adds it, where Apex's kernel does not.
    """
    on_a_stage = _on_a_stage(model)
    plain, _ = trained(version, on_a_stage, fused, bf16=True, **model)
    ours, _ = trained(version, 2 * on_a_stage, fused, bf16=True, **pipeline(schedule, method), **model)
    if method is None:
        assert ours.losses == pytest.approx(plain.losses, rel=BOUND)
        assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=ONE_ROUNDING)
        assert largest_distance(ours, plain) <= ONE_ROUNDING
    else:
        assert_as_close(ours, plain, trained(version, on_a_stage, fused, **model)[0])


@slow
@pytest.mark.parametrize(
    ("schedule", "method", "sharded", "model"),
    [
        ("1f1b", "vocab-2", False, {}),
        ("v-half", "vocab-2", True, IN_TURN),
    ],
)
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, schedule, method, sharded, model):
    assert_checkpoint_moves(tmp_path, schedule, method, sharded, **model)


TWO_STEPS = {"train_iters": 2, "eval_interval": 1}
IMPLEMENTATIONS = ("transformer_engine", "local")
SCHEDULES = [("v-half", "vocab-1"), ("1f1b", "vocab-2")]
# Versions and schedules take turns so that each meets both values of the other three.
COMBINATIONS = [
    (IMPLEMENTATIONS[local], bool(apex), (FUSED, APART)[apart], version, SCHEDULES[(apex + apart) % 2])
    for local, apex, apart in product(range(2), repeat=3)
    for version in [(MEGATRON, NEWEST)[(local + apex + apart) % 2]]
]


@pytest.mark.parametrize(("layers", "apex", "fused", "version", "schedule"), first_by_default(COMBINATIONS))
def test_every_combination_of_layers_apex_and_fusion_trains_as_plain_megatron(layers, apex, fused, version, schedule):
    model = {"transformer_impl": layers, **TWO_STEPS}
    plain, _ = trained(version, 1, APART, **model)
    ours, products = trained(version, 2, fused, apex=apex, **pipeline(*schedule), **model)
    assert_equal(ours, plain, BOUND)
    assert any(each.queued for each in products) == (layers == IMPLEMENTATIONS[0] and schedule[0] == "v-half")


@slow
@pytest.mark.parametrize(
    ("schedule", "method"),
    [
        ("v-half", "vocab-2"),
        ("interleaved", "vocab-1"),
    ],
)
def test_what_megatron_puts_off_for_its_own_schedule_is_computed_in_ours(schedule, method):
    put_off = {**TWO_STEPS, "defer_embedding_wgrad_compute": True}
    plain, _ = trained(NEWEST, 2, FUSED, pipeline_model_parallel_size=2, **put_off)
    ours, _ = trained(NEWEST, 2, FUSED, **pipeline(schedule, method), **put_off)
    assert_equal(ours, plain, BOUND)
