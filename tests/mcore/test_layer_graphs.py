"""Test CUDA graphs of layers under our schedules: the order in which they share buffers, and tensors that outlive a
replay.

Without a GPU, nothing is captured. A stand-in for Transformer Engine's capture runs layers eagerly, and shares buffers
in the given order, as Transformer Engine does. It immediately fills everything that this order frees with NaN.

Megatron's own graph module (`--cuda-graph-impl local`) runs unmodified on the stand-in `cpu_graphs`: it records the
passes of the first iteration, captures them in that order into one pool, and replays them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from unittest import mock

import pytest
import torch

from megatron_vp.errors import UserError
from megatron_vp.mcore.training.forward_backward import graph_order
from megatron_vp.schedule import FAMILIES, VocabMethod
from megatron_vp.schedule.flex import fitted
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.passes import Pass, PassKind
from megatron_vp.schedule.request import ScheduleRequest
from tests.harness.ranks import RankError, run_ranks
from tests.harness.training import Run, _merge, comparable_model, train_case
from tests.mcore.case_parts import ALL_TO_ALL, PAIRS, way_options
from tests.mcore.comparison import assert_equal
from tests.mcore.cpu_graphs import Device

slow = pytest.mark.slow
MICROBATCHES = 6


class Buffer:
    """Memory that graphs share: whoever writes last is read. Values of other sizes have other places in it."""

    def __init__(self) -> None:
        self._tensors: dict[tuple, torch.Tensor] = {}

    def hold(self, value: torch.Tensor, number: int = 0) -> torch.Tensor:
        """The buffer with this value, behind autograd's back, as a replay writes it."""
        key = number, value.shape, value.dtype
        held = self._tensors.setdefault(key, value.detach().clone()).data
        return held.copy_(value.detach())

    def spoil(self) -> None:
        for each in self._tensors.values():
            each.data.fill_(torch.nan if each.is_floating_point() else 0)


class Graph:
    """A layer's graph for one microbatch."""

    freed: list[Buffer]
    """What no graph to come may read, on this rank; shared by its graphs."""

    def __init__(self, layer, given, result, freed) -> None:
        self.layer, self.given, self.result, self.freed = layer, given, result, freed
        self.gradient = Buffer()
        self.releases: list[Buffer] = []

    def __call__(self, hidden, is_first_microbatch=None, **kwargs):
        return Replay.apply(self, kwargs, hidden)

    def reset(self) -> None:
        pass


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, kwargs, hidden):
        from megatron.core.transformer import cuda_graphs

        _spoil(graph.freed)
        ctx.graph = graph
        leaf = graph.given.hold(hidden).requires_grad_()
        # While it captures, a layer of experts returns what its router has computed.
        cuda_graphs._set_capture_start()
        with torch.enable_grad():
            outputs = graph.layer._te_cuda_graph_capture(leaf, **kwargs)
        cuda_graphs._set_capture_end()
        graph.eager = leaf, outputs
        held = tuple(graph.result.hold(*each[::-1]) for each in enumerate(outputs))
        ctx.mark_non_differentiable(*(mine for mine, its in zip(held, outputs, strict=True) if not its.requires_grad))
        return held

    @staticmethod
    def backward(ctx, *gradients):
        graph = ctx.graph
        _spoil(graph.freed)
        leaf, outputs = graph.eager
        of = [(mine, its) for mine, its in zip(outputs, gradients, strict=True) if mine.requires_grad]
        torch.autograd.backward(*zip(*of, strict=True))
        graph.freed += graph.releases
        return None, None, graph.gradient.hold(leaf.grad)


def _spoil(freed) -> None:
    while freed:
        freed.pop().spoil()


def make_graphed_callables(callables, sample_args, *, _order, _num_layers_per_chunk, **_):
    """Graphs with inputs as Megatron shares them, outputs from a pool; a microbatch's B gives both back.

    The gradient of a chunk's input is lost at the next replay, earlier than on a device. Where passes run in pairs,
    that of each layer's input is lost behind the next layer's backward, as on a device.
    """
    layers, start = [], 0
    paired, above = callables[0].config.overlap_moe_expert_parallel_comm, None
    for count in _num_layers_per_chunk:
        layers.append(callables[start : start + count])
        start += count
    microbatches = _order.count(1)
    inputs: dict[int, Buffer] = {}
    freed: list[Buffer] = []
    pool: list[Buffer] = []
    graphs: dict[tuple[int, int], list[Graph]] = {}
    reached: dict[int, int] = {}
    for step in _order:
        chunk, microbatch = abs(step) - 1, reached.get(step, 0)
        reached[step] = microbatch + 1
        if step > 0:
            first = sum(map(len, layers[:chunk])) * microbatches + microbatch * len(layers[chunk])
            made = []
            for place, layer in enumerate(layers[chunk]):
                given = inputs.setdefault(id(sample_args[first + place][0]), Buffer())
                made.append(Graph(layer, given, pool.pop() if pool else Buffer(), freed))
            graphs[chunk, microbatch] = made
        else:
            above = above if paired else None
            for graph in reversed(graphs[chunk, microbatch]):
                graph.releases = [graph.result, graph.given, *([above.gradient] if above else [])]
                pool.append(graph.result)
                above = graph
            if above and not paired:
                above.releases.append(above.gradient)
    return [graph for key in product(range(len(layers)), range(microbatches)) for graph in graphs[key]]


def graphed_case(rank: int, world_size: int, arguments: list[str], broken: str = "") -> Run | None:
    """`train_case` with the stand-in; broken: what is left out."""
    import pretrain_gpt_vp as script
    from megatron_vp.mcore.training import forward_backward

    with ExitStack() as patched:
        # Loads what there is of Transformer Engine's, which the stand-in replaces.
        script.prepare()
        if broken == "order":
            order = megatrons_order(world_size, rank, MICROBATCHES)
            patched.enter_context(mock.patch.object(forward_backward, "graph_order", lambda *_: order))
        if broken == "copies":
            patched.enter_context(mock.patch.object(torch, "clone", lambda gradient: gradient))
        patched.enter_context(captured_on_cpu())
        return train_case(rank, world_size, arguments)


@contextmanager
def captured_on_cpu() -> Iterator[None]:
    """Inside, where a job's graphs are captured once, the stand-in takes Transformer Engine's place."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.module import GraphableMegatronModule
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_vp.mcore.platform import flags

    captured, seeded = [], tensor_parallel.model_parallel_cuda_manual_seed

    def capture(*args, **kwargs):
        captured.append(kwargs["_order"])
        return make_graphed_callables(*args, **kwargs)

    with ExitStack() as patched:
        for target, name, value in (
            (torch.cuda, "set_stream", lambda stream: None),
            (flags, "ROLES", {"of_a_device": {}}),
            (tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed, *_, **__: seeded(seed)),
            (cuda_graphs, "HAVE_TE_GRAPHS", True),
            (cuda_graphs, "make_graphed_callables", capture),
            (cuda_graphs, "is_te_min_version", lambda version: True),
            (
                TransformerLayer,
                "_get_te_cuda_graph_replay_args",
                GraphableMegatronModule._get_te_cuda_graph_replay_args,
            ),
        ):
            patched.enter_context(mock.patch.object(target, name, value, create=True))
        yield
    assert len(captured) == 1, "nothing was captured"


def megatrons_order(size: int, rank: int, microbatches: int) -> list[int]:
    """Of Megatron's own 1F1B."""
    ahead = min(size - 1 - rank, microbatches)
    return [1] * ahead + [1, -1] * (microbatches - ahead) + [-1] * ahead


def locally_graphed_case(rank: int, world_size: int, arguments: list[str], broken: str = "") -> Run | None:
    """`train_case` with Megatron's own graphs on `cpu_graphs`."""
    import pretrain_gpt_vp as script

    script.prepare()
    with replayed_on_cpu():
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


CASES_OF = {"transformer_engine": graphed_case, "local": locally_graphed_case}


@cache
def _trained(broken: str | None = None, modules: str = "", **changes: object) -> Run:
    replicas = int(changes.get("expert_model_parallel_size", 1))
    sizes = {"pipeline_model_parallel_size": 2, "global_batch_size": 2 * MICROBATCHES * replicas, "train_iters": 4}
    words = comparable_model(**{**sizes, "cuda_graph_modules": modules.split() or None, **changes})
    if broken is None:
        return _merge(run_ranks(2 * replicas, train_case, words, timeout=240))
    return _merge(run_ranks(2 * replicas, CASES_OF[changes["cuda_graph_impl"]], words, broken=broken, timeout=240))


def _graphed(
    implementation: str, schedule: str, method: str, broken: str = "", modules: str = "", **options: object
) -> Run:
    return _trained(
        broken=broken,
        cuda_graph_impl=implementation,
        cuda_graph_warmup_steps=1,
        modules=modules,
        **way_options(f"{schedule}/{method}"),
        **options,
    )


@pytest.mark.parametrize(
    ("implementation", "schedule", "method", "modules"),
    [
        ("transformer_engine", "1f1b", "vocab-2", ""),
        pytest.param("transformer_engine", "interleaved", "vocab-2", "attn", marks=slow),
        pytest.param("local", "1f1b", "vocab-1", "attn", marks=slow),
        pytest.param("local", "interlaced", "vocab-2", "", marks=slow),
    ],
)
def test_every_step_equals_plain_megatron_without_graphs(implementation, schedule, method, modules):
    assert_equal(_graphed(implementation, schedule, method, modules=modules), _trained(), 1e-6)


SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 64}


@slow
@pytest.mark.parametrize(
    ("method", "modules", "options"),
    [
        ("vocab-2", "attn moe_router", {}),
        ("vocab-1", "attn moe_router moe_preprocess", SHARED_EXPERT),
        ("vocab-2", "moe_router", {"moe_layer_freq": "([0]+[1]*3)", **SHARED_EXPERT}),
        ("none", "attn", {"moe_layer_freq": "([0]+[1]*3)"}),
        ("vocab-2", "attn moe_router", {"mtp_num_layers": 1, "position_embedding_type": "rope"}),
    ],
)
def test_pairs_replay_the_graphs_of_their_plans(method, modules, options):
    options = {**ALL_TO_ALL, **options}
    paired = _graphed("transformer_engine", "interleaved", method, modules=modules, **PAIRS, **options)
    assert paired.pairs
    assert_equal(paired, _trained(**options), 1e-6)


@slow
def test_each_microbatch_has_rotary_positions_of_its_own():
    rope = {"position_embedding_type": "rope"}
    assert_equal(_graphed("local", "interleaved", "vocab-1", **rope), _trained(**rope), 1e-6)


@slow
@pytest.mark.parametrize("broken", ["order", "copies"])
def test_megatrons_order_and_tensors_that_are_not_copied_are_noticed(broken):
    with pytest.raises((AssertionError, RankError), match=r"gradient of|not close|NaN|nan"):
        assert_equal(_graphed("transformer_engine", "1f1b", "vocab-2", broken), _trained(), 1e-6)


def wrong_reads(handed: list[int], run: list[int]) -> int:
    """Backwards that find another microbatch's input where `handed` has put theirs, in the order `run`.

    Megatron's rule: a forward takes the buffer that has been free for longest, or a new one.
    """
    place: dict[tuple[int, int], int] = {}
    waiting: dict[int, deque[int]] = {}
    free: deque[int] = deque()
    reached: dict[int, int] = {}
    for step in handed:
        chunk, microbatch = abs(step), reached.get(step, 0)
        reached[step] = microbatch + 1
        if step > 0:
            place[chunk, microbatch] = free.popleft() if free else len(set(place.values()))
            waiting.setdefault(chunk, deque()).append(place[chunk, microbatch])
        else:
            free.append(waiting[chunk].popleft())
    holds: dict[int, tuple[int, int]] = {}
    reached, wrong = {}, 0
    for step in run:
        which = abs(step), reached.get(step, 0)
        reached[step] = which[1] + 1
        if step > 0:
            holds[place[which]] = which
        else:
            wrong += holds[place[which]] != which
    return wrong


def orders(name: str, method: VocabMethod, size: int, microbatches: int) -> list[list[int]]:
    family = FAMILIES[name]
    chunks = 2 if family.chunks is None else None
    request = ScheduleRequest.of(family, size, microbatches, method=family.method(method), chunks=chunks)
    if family.bases:
        request = replace(request, family=fitted(request, size + 2))
    schedule = expand_interlaced(request.schedule())
    return [graph_order(schedule, rank) for rank in range(size)]


def _combinations(sizes, microbatches):
    for (name, family), size, count in product(FAMILIES.items(), sizes, microbatches):
        for method in family.methods:
            yield name, method, size, count


def test_the_own_order_of_every_family_shares_no_buffer_that_is_still_read():
    for name, method, size, count in _combinations((2, 4), (1, 6)):
        for order in orders(name, method, size, count):
            assert wrong_reads(order, order) == 0, (name, method, size, count)


@slow
def test_the_same_in_more_sizes():
    size = 8
    for name, method, _, count in _combinations((size,), (1, 2, 3, 5, 8, 13, 16, 24, 32)):
        for order in orders(name, method, size, count):
            assert wrong_reads(order, order) == 0, (name, method, count)


def test_megatrons_order_would_share_buffers_that_are_still_read():
    ours = orders("1f1b", VocabMethod.VOCAB_2, 4, 16)
    found = [wrong_reads(megatrons_order(4, rank, 16), order) for rank, order in enumerate(ours)]
    assert min(found) > 0, found


def test_a_schedule_that_turns_microbatches_around_is_refused():
    steps = [Pass(PassKind.F, 0), Pass(PassKind.F, 1), Pass(PassKind.BW, 1), Pass(PassKind.BW, 0)]
    with pytest.raises(UserError, match="BW1 comes before the same pass of microbatch 0: use --cuda-graph-impl none"):
        graph_order(mock.Mock(ranks=[steps]), 0)
