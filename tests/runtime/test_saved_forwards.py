"""Test offloaded activations: the same gradients, and no device memory in the meantime."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from megatron_vp.errors import UserError
from megatron_vp.runtime import offload
from megatron_vp.runtime.host_memory import HostMemory, parts
from megatron_vp.runtime.offload import Offload, SavedForward, SavedTensor
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.runtime.streams import InlineStream
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.transfers import Copy
from tests.harness.ranks import run_ranks
from tests.runtime.toy import run_pipeline

STEPS = [(1, True), (3, True), (2, False), (8, True)]


@pytest.mark.parametrize(
    ("name", "world", "method", "chunks"),
    [("1f1b", 2, "vocab-2", 1), ("zb-v", 3, "vocab-1", 1), ("po", 2, "vocab-2", 2), ("interleaved", 4, "vocab-2", 1)],
)
def test_gradients_are_bit_for_bit_those_without(name, world, method, chunks):
    both = [
        run_ranks(world, run_pipeline, name, method, STEPS, False, offload_chunks=count, timeout=120)
        for count in (0, chunks)
    ]
    for plain, offloaded in zip(*both, strict=True):
        for one, other in zip(plain, offloaded, strict=True):
            assert one[0] == other[0]
            assert one[1].keys() == other[1].keys()
            assert all(torch.equal(one[1][each], other[1][each]) for each in one[1] if one[1][each] is not None)
    fullest = [max(rank[-1][2] for rank in ranks) for ranks in both]
    assert fullest[1] < fullest[0]


def saved_by(function, *inputs, close=True):
    """What `function` saves for its backward, and its output."""
    saved = SavedForward()
    with saved_tensors_hooks(saved.pack, offload._unpack):
        output = function(*inputs)
    if close:
        saved.close(inputs[0])
    return saved, output


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_OFFLOADED", 0)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 12)
        self.cache = torch.arange(6.0)

    def forward(self, values):
        left, right = self.linear(values * self.cache).chunk(2, dim=-1)
        return torch.tanh(left) * right


def test_what_is_ours_alone_leaves_and_comes_back():
    torch.manual_seed(0)
    layer, values = Layer(), torch.randn(4, 6)
    expected = values.clone().requires_grad_()
    layer(expected).sum().backward()
    weight = layer.linear.weight.grad.clone()
    layer.zero_grad()

    leaf = values.clone().requires_grad_()
    saved, output = saved_by(layer, leaf)
    storages = [StorageWeakRef(each.bytes.untyped_storage()) for each in saved.moving]
    kept = [each.bytes.clone() for each in saved.moving]
    assert saved.sizes == [each.numel() for each in kept] and len(kept) >= 3
    assert leaf.shape == values.shape and leaf.untyped_storage().nbytes() == 4
    for each in saved.moving:
        each.bytes = None
    assert all(each.expired() for each in storages)
    with pytest.raises(AssertionError, match="still in host memory"):
        saved.moving and SavedTensor(saved.moving[0], torch.float32, torch.Size([1]), (1,), 0).unpack()
    for each, held in zip(saved.moving, kept, strict=True):
        each.bytes = held
    output.sum().backward()
    assert torch.equal(leaf.grad, expected.grad) and torch.equal(layer.linear.weight.grad, weight)


def test_a_backward_frees_what_came_back_layer_by_layer():
    memory, store = HostMemory(pins=False), Store()
    shapes = SimpleNamespace(device=torch.device("cpu"))
    iteration = SimpleNamespace(store=store, observer=nullcontext, shapes=shapes)
    offloading = Offload(iteration, InlineStream(), memory, {0})
    values, storages, alive = torch.randn(4, 6), [], []
    with offloading.saving(0, 0) as saved:
        for _ in range(3):
            values = torch.nn.functional.gelu(torch.nn.Linear(6, 6)(values))
            values.register_hook(lambda _: alive.append(sum(not each.expired() for each in storages)))
    store.put(Slot.CHUNK_GRAPH, 0, values.sum(), at=0)
    del values
    saved.close(None)
    away, back = Copy(True, 0, 0, 0), Copy(False, 0, 0, 0)
    offloading.post(away)()
    for kind in (PassKind.O, PassKind.R):
        offloading.handlers[kind](0, 0)
    storages += [StorageWeakRef(each.bytes.untyped_storage()) for each in saved.moving]
    offloading.post(back)()
    del saved
    store.take(Slot.CHUNK_GRAPH, 0, at=0).backward()
    assert alive[0] > alive[1] > alive[2] > 0


def test_parameters_caches_and_what_others_hold_stay():
    layer, values = Layer(), torch.randn(4, 6, requires_grad=True)
    outside = []

    def forward(values):
        hidden = torch.exp(layer(values))
        outside.append(hidden)
        return hidden * 2

    saved, output = saved_by(forward, values)
    moving = {each.bytes.untyped_storage().data_ptr() for each in saved.moving}
    assert not moving & {each.untyped_storage().data_ptr() for each in (layer.cache, outside[0], layer.linear.weight)}
    for each in saved.moving:
        each.bytes = each.bytes.clone()
    output.sum().backward()
    assert values.grad is not None


def test_small_tensors_and_other_kinds_pass_through(monkeypatch):
    values = torch.randn(4, 6, requires_grad=True)
    for smallest, count in ((96, 1), (97, 0)):
        monkeypatch.setattr(offload, "LEAST_OFFLOADED", smallest)
        saved, _ = saved_by(lambda x: torch.exp(x) * 2, values.detach().requires_grad_())
        assert len(saved.moving) == count
    monkeypatch.setattr(offload, "LEAST_OFFLOADED", 0)
    wrapped = TwoTensor(values.detach(), values.detach()).requires_grad_()
    saved, output = saved_by(torch.exp, wrapped, close=False)
    saved.close(None)
    assert saved.moving == []
    output.sum().backward()
    assert type(wrapped.grad) is TwoTensor and torch.equal(wrapped.grad.a, values.exp())


def test_views_of_one_storage_are_copied_once():
    values = torch.randn(4, 6, requires_grad=True)

    def forward(values):
        both = values * 1
        left, right = both[:2], both[2:]
        return left.t() @ right * right.sum()

    saved, _ = saved_by(forward, values)
    assert len({each.bytes.data_ptr() for each in saved.moving}) == len(saved.moving)
    assert 4 * 6 * 4 in saved.sizes


def test_a_forward_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        leaf = torch.randn(4, 6, requires_grad=True)
        saved, output = saved_by(Layer(), leaf)
        storages = [StorageWeakRef(each.bytes.untyped_storage()) for each in saved.moving]
        del saved, output, leaf
        assert storages and all(each.expired() for each in storages)
    finally:
        gc.enable()


def test_slots_are_reused():
    memory = HostMemory(pins=False)
    slots = [memory.take(0, [100, 700]) for _ in range(2)]
    assert [slot.numel() for slot in slots] == [512 + 1024] * 2
    assert [part.numel() for part in parts(slots[0], [100, 700])] == [100, 700]
    one, other = (parts(slot, [100, 700])[1] for slot in slots)
    one.fill_(1), other.fill_(2)
    assert one.unique().tolist() == [1] and one.data_ptr() % 512 == parts(slots[0], [1])[0].data_ptr() % 512
    memory.give(0, slots[0])
    assert memory.take(0, [50, 50]) is slots[0]


@pytest.fixture
def pinning(monkeypatch):
    """The calls to the CUDA runtime, by name; `answer` of each."""
    made, answer = [], {}
    runtime = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=lambda pointer, size, flags: made.append(("pin", pointer)) or answer.get("pin", 0),
        cudaHostUnregister=lambda pointer: made.append(("unpin", pointer)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append(("wait", 0)))
    return made, answer


def test_memory_that_cannot_be_pinned_is_refused_in_one_line(pinning):
    _, answer = pinning
    memory = HostMemory(pins=True)
    answer["pin"] = "cudaErrorMemoryAllocation"
    with pytest.raises(UserError, match=r"cannot pin 0\.00 GiB of host memory .*fewer chunks"):
        memory.take(0, [1000])


def test_a_larger_slot_takes_the_place_of_a_pinned_one(pinning):
    """The device has finished with the smaller slot before it is unpinned."""
    made, _ = pinning
    memory = HostMemory(pins=True)
    slot = memory.take(0, [1000])
    first = slot.data_ptr()
    memory.give(0, slot)
    del slot
    larger = memory.take(0, [5000])
    assert made == [("pin", first), ("wait", 0), ("unpin", first), ("pin", larger.data_ptr())]
    assert larger.numel() == 5120 * 9 // 8
