"""Test the runtime on real processes over gloo against autograd in one process, in fp64."""

import gc
import weakref
from itertools import product

import pytest
import torch

from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.collectives import VocabularyCollectives
from megatron_vp.runtime.iteration import LayerShards
from megatron_vp.runtime.links import CONTENT
from megatron_vp.schedule.transfers import Channel
from megatron_vp.vocab.operations import operations_for
from megatron_vp.vocab.shards import VocabShards
from tests.harness.ranks import run_ranks
from tests.runtime import toy
from tests.runtime.toy import reference, run_pipeline

slow = pytest.mark.slow
EXTRA = {"vocab-2": 1, "vocab-1": 2}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize(("name", "world"), [("1f1b", 2), ("1f1b", 3), ("1f1b", 4), ("zb-h1", 2), ("zb-h1", 4)])
def test_losses_and_gradients_equal_one_process(name, world, method, tied):
    # Iterations of every length in one life of the processes, evaluation in between: nothing may be left over.
    steps = [(1, True), (world - 1, True), (3, False), (world, True), (world + 1, True), (1, False), (4 * world, True)]
    results = run_ranks(world, run_pipeline, name, method, steps, tied, timeout=120)
    for iteration, (microbatches, gradients) in enumerate(steps):
        losses, expected = reference(world, microbatches, iteration, tied)
        assert results[-1][iteration][0] == pytest.approx(losses, rel=1e-12)
        assert all(not ranks[iteration][0] for ranks in results[:-1]), "losses belong to the last rank"
        if not gradients:
            continue
        found = {f"layer{rank}": results[rank][iteration][1][f"layer{rank}"] for rank in range(world)}
        for name in ("embedding",) if tied else ("embedding", "output"):
            found[name] = torch.cat([ranks[iteration][1][name] for ranks in results])
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-12 * gradient.norm(), (name, iteration)
        for rank in range(world):
            in_flight = results[rank][iteration][2]
            promised = (world - rank if name == "1f1b" else world) + EXTRA[method]
            assert in_flight <= min(microbatches, promised)
            assert in_flight == promised or name != "1f1b" or microbatches < 4 * world


ASSIGNED = [
    ("1f1b", 2, (23, 0)),
    ("1f1b", 3, (0, 23, 0)),
    ("1f1b", 4, (0, 13, 10, 0)),
    ("zb-h1", 3, (2, 4, 17)),
    ("v-half", 3, (0, 6, 17)),
    ("interleaved", 4, (5, 0, 0, 18)),
    ("dualpipe-v", 2, (0, 23)),
]


ASSIGNED_CASES = [
    pytest.param(*case, method, tied, marks=() if place == number % 4 else pytest.mark.slow)
    for number, case in enumerate(ASSIGNED)
    for place, (method, tied) in enumerate(product(("vocab-1", "vocab-2"), (False, True)))
    if place == number % 4 or (place, number % 2) == (3 - number % 4, 1)
]
"""One method of each by default, tied or untied, and of every second the other method, untied or tied."""


@pytest.mark.parametrize(("name", "world", "rows", "method", "tied"), ASSIGNED_CASES)
def test_shards_of_any_size_and_ranks_without_rows(name, world, rows, method, tied):
    steps = [(world + 1, True), (2, False), (3, True)]
    results = run_ranks(world, run_pipeline, name, method, steps, tied, stage_rows=rows, timeout=120)
    for iteration, (microbatches, gradients) in enumerate(steps):
        found = {name: gradient for ranks in results for name, gradient in ranks[iteration][1].items()}
        stages = sum(each.startswith("layer") for each in found)
        losses, expected = reference(stages, microbatches, iteration, tied)
        assert results[-1][iteration][0] == pytest.approx(losses, rel=1e-12)
        assert all(ranks[iteration][2] <= microbatches for ranks in results), "each of v chunks counts as 1/v"
        if not gradients:
            continue
        for name in ("embedding",) if tied else ("embedding", "output"):
            found[name] = torch.cat([ranks[iteration][1][name] for ranks in results])
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-12 * gradient.norm(), (name, iteration)


FROZEN_CASES = [
    ((0, 23, 0), "vocab-1", True),
    ((8, 8, 7), "vocab-2", False),
    pytest.param((0, 23, 0), "vocab-2", False, marks=slow),
    pytest.param((8, 8, 7), "vocab-1", True, marks=slow),
]


@pytest.mark.parametrize(("rows", "method", "tied"), FROZEN_CASES)
def test_frozen_layers_have_no_gradients_and_all_others_those_of_one_process(rows, method, tied):
    steps = [(4, True), (2, False), (3, True)]
    for frozen in [("embedding", "output")] if tied else [("embedding",), ("output",), ("embedding", "output")]:
        options = {"stage_rows": rows, "frozen": frozen}
        results = run_ranks(3, run_pipeline, "1f1b", method, steps, tied, **options, timeout=120)
        for iteration, (microbatches, gradients) in enumerate(steps):
            losses, expected = reference(3, microbatches, iteration, tied)
            assert results[-1][iteration][0] == pytest.approx(losses, rel=1e-12)
            if not gradients:
                continue
            for rank, ranks in enumerate(results):
                found = ranks[iteration][1]
                names = {"embedding"} if tied else {"embedding", "output"}
                assert all(found[name] is None for name in names & {*frozen})
                layer = expected[f"layer{rank}"]
                assert (found[f"layer{rank}"] - layer).norm() <= 1e-12 * layer.norm()
            for name in {"embedding", "output"} - {*frozen}:
                whole = torch.cat([ranks[iteration][1][name] for ranks in results])
                assert (whole - expected[name]).norm() <= 1e-12 * expected[name].norm()


def test_a_member_without_rows_adds_nothing_to_the_statistics():
    collectives = object.__new__(VocabularyCollectives)
    collectives._shapes = Shapes(5, 2, 6, torch.float32, torch.device("cpu"))
    collectives._layer_shards = LayerShards(VocabShards(9, 3), None, None)
    nothing = collectives._no_statistics(0)
    # Beside logits as far below zero as these, a maximum of 0 would leave no digit of the sum.
    own = torch.tensor([-500.0, 3.0, -501.0])[:, None].expand_as(nothing).contiguous()
    total = torch.empty_like(own)
    operations_for(own).fold_(total, torch.stack([nothing, own, nothing]))
    assert torch.equal(total, own)


def test_the_gradient_of_a_stages_output_has_the_shape_of_the_next_stages_input():
    shapes = Shapes(5, 2, 6, torch.float32, torch.device("cpu"), mtp_depth=1, mtp_stage=1)
    sizes = [CONTENT[channel][1](shapes, 1).shape[0] for channel in (Channel.ACTIVATION, Channel.GRADIENT)]
    assert sizes == [5, 10]


def kept_models(rank, world, name, method):
    """How many of three iterations' models a rank still has when no garbage collector runs, as with --manual-gc."""
    made = weakref.WeakSet()

    class Noted(toy.ToyModel):
        def __init__(self, *args):
            super().__init__(*args)
            made.add(self)

    plain, toy.ToyModel = toy.ToyModel, Noted
    gc.disable()
    try:
        run_pipeline(rank, world, name, method, [(3, True), (2, False), (3, True)], False)
        return len(made)
    finally:
        gc.enable()
        toy.ToyModel = plain


@pytest.mark.parametrize(("name", "method"), [("1f1b", "vocab-1"), ("zb-h1", "vocab-2")])
def test_an_iteration_is_freed_by_its_last_reference(name, method):
    assert run_ranks(2, kept_models, name, method, timeout=120) == [0, 0]
