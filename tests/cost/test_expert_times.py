"""Test what experts add to the time of a layer in addition to their FLOPs, against counts by hand."""

import pytest

from megatron_vp.cost.layers.layer_operations import distinct
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.jobs.layer_kind import LayerKind

MODEL = ModelShape(8, 2048, 16, 1024, 1000, gated=True, experts=16, experts_per_token=4)


def job(model=MODEL, **changes):
    sizes = {"sequence": 4096, "micro_batch": 1, "microbatches": 1, "pipeline": 1, "layers": LayerKind.ENGINE}
    return Job(model, **sizes | changes)


def test_a_token_goes_to_as_many_places_as_its_experts_fall_into():
    assert distinct(1, 4) == 1 / 4 and distinct(10**6, 4) == pytest.approx(1, rel=1e-5)
    assert distinct(2, 2) == (1 + 1 / 2) / 2  # two places in one case of two


def test_a_dispatcher_that_is_not_said_is_the_flexible_one_between_nodes():
    sizes = [(8, 1), (16, 1), (4, 2), (8, 2)]
    found = [job(data=64, tensor=t, expert=e, dispatcher="").is_flexible for e, t in sizes]
    assert found == [False, True, False, True]
    assert not job(data=64, expert=16).is_flexible
    assert job(data=64, expert=8, dispatcher="flex").is_flexible
