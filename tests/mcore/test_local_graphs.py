"""Test Megatron's own CUDA graphs of layers (`--cuda-graph-impl local`) under our schedules, on the stand-in
`cpu_graphs`.

Megatron's graph module runs unmodified: it records the passes of the first iteration, captures them in that order into
one pool, and replays them. Only the device is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import pytest

from tests.harness.ranks import RankError, run_ranks
from tests.harness.training import Run, _merge, comparable_model, train_case
from tests.mcore.comparison import assert_equal
from tests.mcore.cpu_graphs import Device
from tests.mcore.test_layer_graphs import MICROBATCHES, megatrons_order

slow = pytest.mark.slow


def graphed_case(rank: int, world_size: int, arguments: list[str], broken: str = "") -> Run | None:
    """`train_case` with the stand-in; broken: what is left out."""
    from megatron.core.transformer import cuda_graphs

    import pretrain_gpt_vp as script
    from megatron_vp.mcore.training import megatron_model

    record = cuda_graphs._CudagraphGlobalRecord
    create = record._create_cudagraphs

    def create_in_megatrons_order() -> object:
        record.cudagraph_record = in_megatrons_order(record.cudagraph_record, world_size, rank)
        return create()

    with ExitStack() as patched:
        script.prepare()
        if broken == "order":
            patched.enter_context(mock.patch.object(record, "_create_cudagraphs", create_in_megatrons_order))
        if broken == "copies":
            patched.enter_context(mock.patch.object(megatron_model, "_copied", lambda output: output))
        patched.enter_context(replayed_on_cpu())
        return train_case(rank, world_size, arguments)


@contextmanager
def replayed_on_cpu() -> Iterator[None]:
    """Inside, the stand-in takes the device's place, where a job's graphs are recorded once and replayed twice."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import cuda_graphs

    from megatron_vp.mcore.platform import flags

    device, seeded = Device(), tensor_parallel.model_parallel_cuda_manual_seed

    def seed(number: int, *_: object, **__: object) -> None:
        seeded(number)
        cuda_graphs.get_cuda_rng_tracker().is_inference_rng_tracker = True  # one that graphs may use

    with ExitStack() as patched:
        for target, name, value in (
            (tensor_parallel, "model_parallel_cuda_manual_seed", seed),
            (flags, "ROLES", {"of_a_device": {}}),
            (cuda_graphs, "torch", device),
            (cuda_graphs, "get_all_rng_states", dict),
        ):
            patched.enter_context(mock.patch.object(target, name, value))
        yield
    replays = [graph.replays for graph in device.graphs]
    assert len(replays) >= 2 * MICROBATCHES and min(replays) >= 2, "graphs were not replayed"


def in_megatrons_order(records: list[tuple], size: int, rank: int) -> list[tuple]:
    """The captures of one chunk in the order of Megatron's own 1F1B."""
    kinds: dict[str, list[list[tuple]]] = {"fwd": [], "bwd": []}
    for each in records:
        microbatches = kinds[each[1]]
        if not microbatches or any(each[0].base_module is other[0].base_module for other in microbatches[-1]):
            microbatches.append([])
        microbatches[-1].append(each)
    forwards, backwards = map(iter, kinds.values())
    order = megatrons_order(size, rank, MICROBATCHES)
    return [each for step in order for each in next(forwards if step > 0 else backwards)]


@cache
def _trained(*, broken: str | None = None, **changes: object) -> Run:
    sizes = {"pipeline_model_parallel_size": 2, "global_batch_size": 2 * MICROBATCHES, "train_iters": 4}
    words = comparable_model(**{**sizes, **changes})
    if broken is None:
        return _merge(run_ranks(2, train_case, words, timeout=240))
    return _merge(run_ranks(2, graphed_case, words, broken=broken, timeout=240))


ROPE = {"position_embedding_type": "rope"}


def _graphed(schedule: str, method: str | None, broken: str = "", modules: str | None = None, **options: object) -> Run:
    return _trained(
        cuda_graph_impl="local",
        cuda_graph_warmup_steps=1,
        cuda_graph_modules=modules,
        broken=broken,
        vocab_parallel=method is not None,
        vocab_parallel_algorithm=method,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=2 if schedule == "interleaved" else None,
        **options,
    )


@pytest.mark.parametrize(
    ("schedule", "method", "modules"),
    [
        pytest.param("1f1b", "vocab-2", None, marks=slow),
        pytest.param("1f1b", "vocab-1", "attn", marks=slow),
        pytest.param("interleaved", "vocab-1", None, marks=slow),
        pytest.param("interlaced", "vocab-2", None, marks=slow),
    ],
)
def test_every_step_equals_plain_megatron_without_graphs(schedule, method, modules):
    assert_equal(_graphed(schedule, method, modules=modules), _trained(), 1e-6)


@slow
def test_each_microbatch_has_rotary_positions_of_its_own():
    assert_equal(_graphed("interleaved", "vocab-1", **ROPE), _trained(**ROPE), 1e-6)


@slow
@pytest.mark.parametrize("broken", ["order", "copies"])
def test_megatrons_order_and_outputs_that_are_not_copied_are_noticed(broken):
    with pytest.raises((AssertionError, RankError), match=r"gradient of|not close|NaN|nan|free a view"):
        assert_equal(_graphed("1f1b", "vocab-2", broken), _trained(), 1e-6)
