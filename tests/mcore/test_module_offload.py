"""Test Megatron's offloading of modules' inputs (`--fine-grained-activation-offloading`) in the order of our schedules.

Megatron's manager runs unmodified, but takes tensors on the CPU as if they were on a device. Stand-ins for streams know
which copies have ended. Host memory that is free, and storage that Megatron releases, holds no values. First toy layers
run in the orders of all schedules without W, then Transformer Engine's layers on the stand-in for its kernels.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_vp.schedule import FAMILIES, VocabMethod, instructions
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.passes import Pass, PassKind
from megatron_vp.schedule.request import ScheduleRequest
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, tiny_model, train_case
from tests.mcore.case_parts import GROWING, way_options
from tests.mcore.comparison import assert_equal
from tests.mcore.engine import APART, BOUND, LLAMA, MODEL, NEWEST, ONE_CALL, on_cpu, require

slow = pytest.mark.slow
DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
SMALLEST = 1024
"""Elements; of these models, what is larger is saved in every module."""


class Stream:
    """A stream or an event, with what it knows to have ended: the number of copies by stream."""

    def __init__(self, **_: object) -> None:
        self.known: Counter[int] = Counter()

    def wait_event(self, other: Stream) -> None:
        self.known |= other.known

    wait_stream = wait_event

    def record(self, stream: Stream) -> None:
        self.known = Counter(stream.known)

    def copies(self) -> tuple[int, int]:
        """Issue a copy; return its stream and number."""
        self.known[id(self)] += 1
        return id(self), self.known[id(self)]

    def require(self, copy: tuple[int, int] | None) -> None:
        assert copy is None or self.known[copy[0]] >= copy[1], "memory is used before a copy has ended"


@dataclass
class Moved:
    """What one rank moved in all iterations, and the managers that did."""

    away: int = 0
    back: int = 0
    ahead: int = 0
    """Tensors that returned before a backward asked for them."""
    managers: set[int] = field(default_factory=set)


@contextmanager
def offloaded_on_cpu(broken: str = "") -> Iterator[Moved]:
    """Inside, Megatron's managers take tensors on the CPU; broken: what is left out."""
    from megatron.core.extensions import transformer_engine as engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatrons

    from megatron_vp.mcore.training import module_offload

    handler, pool, manager = (
        megatrons.ChunkOffloadHandler,
        megatrons.OffloadTensorPool,
        megatrons.PipelineOffloadManager,
    )
    offload, reload, pop, free = handler.offload, handler.reload, handler.tensor_pop, pool.free
    moved, running = Moved(), [Stream()]

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        running.append(stream)
        yield
        running.pop()

    def offloaded(self, tensor, *args, **kwargs):
        moved.away += 1
        moved.managers.add(id(manager.OFFLOAD_MGR))
        state = offload(self, tensor, *args, **kwargs)
        state[1].written = running[-1].copies()
        return state

    def reloaded(self, state, *args, **kwargs):
        moved.back += 1
        moved.ahead += len(running) > 1
        running[-1].require(state[1].written)
        tensor = reload(self, state, *args, **kwargs)
        tensor.written = running[-1].copies()
        return tensor

    def popped(self, tag):
        tensor = pop(self, tag)
        running[-1].require(getattr(tensor, "written", None))
        return tensor

    def freed(self, tensor):
        tensor.fill_(torch.nan)
        free(self, tensor)

    streams = {"Stream": Stream, "Event": Stream, "stream": inside, "current_stream": lambda: running[-1]}
    pageable = lambda *size, pin_memory=False, **how: torch.empty(*size, **how)  # noqa: E731
    device = _with(torch, cuda=_with(torch.cuda, **streams), empty=pageable)
    with ExitStack() as patched:
        for target, name, value in (
            (megatrons, "torch", device),
            (module_offload, "torch", device),
            (handler, "_can_manage_tensor_for_offload", staticmethod(lambda each: type(each) is torch.Tensor)),
            (handler, "offload", offloaded),
            (handler, "reload", reloaded),
            (handler, "tensor_pop", popped),
            (pool, "free", freed),
            (engine, "cpu_offload", engine.cpu_offload or SimpleNamespace()),
        ):
            patched.enter_context(mock.patch.object(target, name, value))
        own = module_offload.ModuleOffload
        if broken == "waits":
            patched.enter_context(mock.patch.object(own, "on_get_saved_tensor", manager.on_get_saved_tensor))
        if broken == "order":
            for name in ("push", "flush", "pop_forward_chunk"):
                patched.enter_context(mock.patch.object(own, name, getattr(manager, name)))
            patched.enter_context(mock.patch.object(own, "begin", _only_forwards))
        yield moved


def _only_forwards(manager: Any, instruction: instructions.Run) -> None:
    if instruction.action.kind is PassKind.F:
        manager.forward = instruction.action[1:]


def _with(module: ModuleType, **own: object) -> ModuleType:
    view = ModuleType(module.__name__)
    vars(view).update({"__getattr__": lambda name: getattr(module, name), **own})
    return view


def toy_chunk(x: torch.Tensor, weights: list[torch.Tensor], kinds: str, offloads: bool) -> torch.Tensor:
    """A chunk of toy layers with modules inside of modules, as in Megatron's layers; a letter is a layer's kind."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Offloading,
    )

    for weight, kind in zip(weights, kinds, strict=True):
        outer = Offloading(offloads, x, "outer")
        with outer as x:
            inside = x * x * weight
        for name in {"a": ("first", "second"), "b": ("second", "third")}[kind]:
            inner = Offloading(offloads, inside, name)
            with inner as given:
                inside = torch.sin(given)
            inside = inner.group_offload(inside, forced_released_tensors=[given])
        x = outer.group_offload(x + inside, forced_released_tensors=[x])
    return x


def toy_iterations(order: list[Pass], chunks: list[str], offloads: bool) -> list[torch.Tensor]:
    """The gradients of three iterations, in each with the passes of `order`."""
    from megatron_vp.mcore.training.module_offload import PipelineOffloadManager, offloading

    torch.manual_seed(0)
    weights = [[torch.rand(8, requires_grad=True) for _kind in kinds] for kinds in chunks]
    config = SimpleNamespace(fine_grained_activation_offloading=offloads)
    model = SimpleNamespace(chunks=[SimpleNamespace(config=config)], module_offload=None)
    schedule, gradients = object(), []

    def forward(x: torch.Tensor, chunk: int) -> torch.Tensor:
        if offloads:
            PipelineOffloadManager.OFFLOAD_MGR.init_model_chunk_offload_handler(0, 1, 0, min_offloaded_tensor_size=1)
        return toy_chunk(x, weights[chunk], chunks[chunk], offloads)

    for _ in range(3):
        outputs = {}
        with offloading(model, schedule, True, nullcontext) as observer:
            for step in order:
                which = step.microbatch, step.chunk
                with observer(instructions.Run(step)):
                    if step.kind is PassKind.F:
                        leaf = torch.rand(8, requires_grad=True)
                        outputs[which] = leaf, forward(leaf, step.chunk)
                    else:
                        leaf, output = outputs.pop(which)
                        torch.autograd.backward(output, torch.ones(8))
                        gradients.append(leaf.grad)
        with (
            offloading(model, object(), False, nullcontext) as observer,
            observer(instructions.Run(order[0])),
            torch.no_grad(),
        ):
            forward(torch.rand(8), 0)
        gradients += [weight.grad.clone() for each in weights for weight in each if weight.grad is not None]
    return gradients


def orders(name: str, method: VocabMethod, size: int, microbatches: int) -> list[list[Pass]]:
    """The forwards and backwards of every rank."""
    family = FAMILIES[name]
    chunks = 2 if family.chunks is None else None
    request = ScheduleRequest.of(family, size, microbatches, method=family.method(method), chunks=chunks)
    whole = (PassKind.F, PassKind.B, PassKind.BW)
    return [[step for step in rank if step.kind in whole] for rank in expand_interlaced(request.schedule()).ranks]


def random_order(seed: int) -> list[Pass]:
    """Any order in which each backward comes behind its forward."""
    draw = random.Random(seed)
    left = [Pass(PassKind.F, microbatch, chunk) for microbatch in range(5) for chunk in range(3)]
    held, order = [], []
    draw.shuffle(left)
    while left or held:
        if left and (not held or draw.random() < 0.5):
            held.append(left.pop())
            order.append(held[-1])
        else:
            order.append(held.pop(draw.randrange(len(held)))._replace(kind=PassKind.B))
    return order


WHOLE = [name for name, family in FAMILIES.items() if not family.splits_backward]
CHUNKS = ["aa", "a", "", "ba", "bbbb"]
"""Kinds of layers: also of a chunk without layers, and of chunks whose layers differ."""


@pytest.fixture
def alone(monkeypatch):
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatrons

    monkeypatch.setattr(megatrons, "print_offload_summary_table", lambda *_, **__: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def assert_toy_is_right(order: list[Pass], chunks: list[str]) -> None:
    expected = toy_iterations(order, chunks, False)
    with offloaded_on_cpu() as moved:
        found = toy_iterations(order, chunks, True)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert moved.away == moved.back > 0 and len(moved.managers) == 1


@pytest.mark.parametrize("name", WHOLE)
def test_the_order_of_every_rank_brings_back_what_each_backward_needs(alone, name):
    for method, size in product(FAMILIES[name].methods, (2, 4)):
        for rank, order in enumerate(orders(name, method, size, 6)):
            assert_toy_is_right(order, [CHUNKS[(rank + chunk) % len(CHUNKS)] or "a" for chunk in range(2)])


def test_so_does_any_order_of_unlike_chunks(alone):
    for seed in range(20):
        assert_toy_is_right(random_order(seed), [CHUNKS[(seed + chunk) % len(CHUNKS)] for chunk in range(3)])


@pytest.mark.parametrize(
    ("broken", "said"), [("order", "Chunk mismatch|No non-empty chunk"), ("waits", "before a copy has ended")]
)
def test_megatrons_own_order_and_missing_waits_are_noticed(alone, broken, said):
    with pytest.raises(AssertionError, match=said), offloaded_on_cpu(broken):
        toy_iterations(orders("interleaved", VocabMethod.VOCAB_2, 2, 4)[0], ["aa", "aa"], True)


def offloading_case(rank: int, world_size: int, arguments: list[str]) -> tuple[Run | None, Moved]:
    """`train_case` with Transformer Engine's layers and tensors that leave the device."""
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    with on_cpu(NEWEST, APART), ExitStack() as patched:
        from megatron.core.pipeline_parallel import utils

        from megatron_vp.mcore.platform import flags

        patched.enter_context(mock.patch.object(flags, "ROLES", {"of_a_device": {}}))
        patched.enter_context(mock.patch.object(utils, "set_ideal_affinity_for_current_gpu", lambda: None))
        moved = patched.enter_context(offloaded_on_cpu())
        return train_case(rank, world_size, arguments), moved


@cache
def _trained(world_size: int, offloaded: tuple[str, ...] = (), **changes: object) -> tuple:
    require(NEWEST)
    ours = {
        "fine_grained_activation_offloading": bool(offloaded),
        "offload_modules": list(offloaded) or None,
        "min_offloaded_tensor_size": SMALLEST if offloaded else None,
    }
    changes = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    words = tiny_model(**MODEL | ours | changes)
    found = run_ranks(world_size, offloading_case, words, timeout=400)
    return _merge([run for run, _ in found]), [moved for _, moved in found]


@slow
@pytest.mark.parametrize(
    ("way", "size"),
    [
        *product(("1f1b/vocab-1", "1f1b/vocab-2"), (2, 4)),
        *product(("interleaved/vocab-1", "interleaved/vocab-2", "interleaved/none", "interlaced/vocab-2"), (2,)),
    ],
)
def test_every_step_equals_plain_megatron_without_the_option(way, size):
    model = {"num_layers": 4 * size} if "interleaved" in way else {}
    plain, none = _trained(1, **model)
    ours, moved = _trained(size, DENSE, **way_options(way, size), **model)
    assert_equal(ours, plain, BOUND)
    assert not any(each.away for each in none)
    for each in moved:
        assert each.away == each.back > 0 and each.ahead > 0 and len(each.managers) == 1


EXPERTS = {**ONE_CALL, **LLAMA, "recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act")}


@slow
@pytest.mark.parametrize(
    "model",
    [
        EXPERTS,
        {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        {"activation_offload_fraction": 0.5},
        {"delta_offload_bytes_across_pp_ranks": 50_000},
        {"fine_grained_offloading_max_inflight_offloads": 1},
    ],
    ids=["experts", "heads", "fraction", "delta", "in flight"],
)
@pytest.mark.parametrize("way", ["1f1b/vocab-2", "interleaved/vocab-1"])
def test_the_same_with_other_layers_and_settings(way, model):
    layers = {"num_layers": 8, **{name: value for name, value in model.items() if "offload" not in name}}
    modules = (*DENSE, "expert_fc1", "moe_act") if "num_experts" in model else DENSE
    ours, moved = _trained(2, modules, **way_options(way, 2), **{**layers, **model})
    assert_equal(ours, _trained(1, **layers)[0], BOUND)
    assert all(each.away == each.back > 0 for each in moved)


@slow
def test_a_growing_batch_starts_a_new_record():
    growing = {**GROWING, "train_iters": 5, "lr": 1e-5}
    ours, moved = _trained(2, DENSE, **way_options("1f1b/vocab-2", 2), **growing)
    assert_equal(ours, _trained(1, **growing)[0], BOUND)
    assert all(each.away == each.back > 0 and len(each.managers) > 1 for each in moved)
