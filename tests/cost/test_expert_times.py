"""Test what experts add to the time of a layer in addition to their FLOPs, against counts by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.layer_operations import COPIES, SORTED, distinct, expert_copies, operations
from megatron_vp.cost.layers.shapes import Fp8Recipe, Job, ModelShape, Recompute
from megatron_vp.cost.ranks.communication import CommunicationModel
from megatron_vp.cost.ranks.pass_times import PRODUCT, PassTimes
from megatron_vp.jobs.layer_kind import LayerKind

H100 = HARDWARE["h100"]
MODEL = ModelShape(8, 2048, 16, 1024, 1000, gated=True, experts=16, experts_per_token=4)


def job(model=MODEL, **changes):
    sizes = {"sequence": 4096, "micro_batch": 1, "microbatches": 1, "pipeline": 1, "layers": LayerKind.ENGINE}
    return Job(model, **sizes | changes)


def test_a_token_goes_to_as_many_places_as_its_experts_fall_into():
    assert distinct(1, 4) == 1 / 4 and distinct(10**6, 4) == pytest.approx(1, rel=1e-5)
    assert distinct(2, 2) == (1 + 1 / 2) / 2  # two places in one case of two


def test_tokens_are_sorted_for_several_experts_and_fewer_of_them_for_a_flexible_dispatcher():
    several, one = (expert_copies(job(data=16, expert=ranks)) for ranks in (4, 16))
    assert (several, one) == (COPIES + SORTED, COPIES)
    flexible = expert_copies(job(data=16, expert=4, dispatcher="flex"))
    assert flexible == pytest.approx(2 + 6 * (4 * (1 - 0.75**4) / 4))


def test_a_dispatcher_that_is_not_said_is_the_flexible_one_between_nodes():
    sizes = [(8, 1), (16, 1), (4, 2), (8, 2)]
    found = [job(data=64, tensor=t, expert=e, dispatcher="").is_flexible for e, t in sizes]
    assert found == [False, True, False, True]
    assert not job(data=64, expert=16).is_flexible
    assert job(data=64, expert=8, dispatcher="flex").is_flexible


def test_each_product_of_several_experts_takes_its_own_start():
    times = {ranks: PassTimes(job(data=16, expert=ranks), H100) for ranks in (4, 16)}
    first = {ranks: next(op.matrix for op in operations(each.job) if op.name == "up") for ranks, each in times.items()}
    assert first[4].copies == 4 and first[16].copies == 1 and first[4].flops == first[16].flops
    assert times[4].gemm_time(first[4]) - times[16].gemm_time(first[16]) == pytest.approx(4 * PRODUCT)
    four, one = (times[ranks].gemm_time(first[ranks], Fp8Recipe.TENSORWISE) for ranks in (4, 16))
    assert four - one == pytest.approx(4 * PRODUCT)


def test_clamped_experts_with_biases_move_more():
    """Four experts a token, each with 1024 activations and 2048 results."""
    clamped, biased = replace(MODEL, clamped=True), replace(MODEL, clamped=True, expert_biases=True)
    assert not any(op.name in ("clamp", "biases") for op in operations(job(replace(MODEL, expert_biases=True))))
    biases = next(op for op in operations(job(biased)) if op.name == "biases")
    assert (biases.moved, biases.back) == (4096 * 4 * 2048 * 28, 4096 * 4 * 2048 * 36)
    plain, more = (PassTimes(job(model), H100) for model in (MODEL, clamped))
    assert pytest.approx(plain.memory_time(4096 * 4 * 1024 * 16)) == more.layer().F - plain.layer().F
    assert pytest.approx(plain.memory_time(4096 * 4 * 1024 * 24)) == more.layer().B - plain.layer().B
    again = [PassTimes(job(model, recompute_modules=frozenset({"moe_act"})), H100) for model in (MODEL, clamped)]
    assert pytest.approx(plain.memory_time(4096 * 4 * 1024 * 40)) == again[1].layer().B - again[0].layer().B


@pytest.mark.parametrize("changes", [{"recompute": Recompute.FULL}, {"recompute_modules": frozenset({"moe"})}])
def test_what_is_computed_again_is_exchanged_again(changes):
    sizes = {"data": 16, "tensor": 2, "expert": 8, "sequence_parallel": True}
    near, far = (replace(H100, network_bandwidth=rate) for rate in (50e9, 25e9))
    sent = {}
    for name, one in (("kept", job(**sizes)), ("again", job(**sizes, **changes))):
        took = [PassTimes(one, hardware).layer().B for hardware in (near, far)]
        sent[name] = took[1] - took[0]
    exchange = [CommunicationModel(job(**sizes), each).layer_traffic() for each in (near, far)]
    assert sent["kept"] == 0 and sent["again"] == pytest.approx(exchange[1] - exchange[0]) and sent["again"] > 0


def test_gradients_in_fp32_are_read_and_written_in_fp32():
    wide, narrow = (PassTimes(job(wide_gradients=each), H100) for each in (True, False))
    weights = sum(op.matrix.weights for op in operations(wide.job) if op.matrix)
    assert pytest.approx(wide.memory_time(4 * weights)) == wide.layer().W - narrow.layer().W
