"""A device that computes nothing, but checks the order of all operations on its memory.

Inside `Device.active`, the real runtime runs on fake CUDA tensors, which have shapes and storages but no data. Streams
and events are vector clocks (Mattern, 1988) with one component per stream. An operation may follow another only if the
clock of its stream has passed the other's stamp, whatever the order in which the host issued them. The device checks

- every read and write of a storage, against the writes, and for writes the reads, of other streams;
- every release of a storage, against its uses by streams other than the one it was allocated on, because the caching
  allocator hands the memory to that stream's next allocation at once;
- every operation for which the host would wait for the device.

With a `World` (`tests.runtime.world`), the devices of all ranks run at once, and a host may wait for its device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_vp.vocab.loss import Derivative

if TYPE_CHECKING:
    from tests.runtime.world import World

Clock = dict[int, int]
"""By stream, how many of its operations are known to be over."""

MAKES_ROOM = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that allocate and launch nothing."""
VARIANTS = 8
"""Kernels of one operation: which of them runs depends on sizes, and in some operations on the data."""
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
"""Operations whose result the host needs."""


Meeting = tuple[object, int]
"""A communicator, and how many ranks take part."""
Buffer = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a message or a collective moves."""
_THREAD = threading.local()
"""`device`: the device of the rank that this thread plays."""


class Cause(Enum):
    """Why a host may wait until its device has done everything that was issued."""

    ALLOCATION = "the allocator asks the driver for memory, or gives some back"
    FIRST_USE = "a kernel is loaded when it is first used"
    LAUNCH = "CUDA_LAUNCH_BLOCKING=1, a debugger"
    TIMER = "a timer, a call of torch.cuda.synchronize"


@contextmanager
def stands_in_for_cuda() -> Iterator[None]:
    """Streams and events are those of the device of the thread that makes them."""
    stand_ins = {
        "Stream": lambda priority=0: Stream(_THREAD.device, priority),
        "Event": lambda blocking=False: Event(_THREAD.device, blocking),
        "current_stream": lambda: _THREAD.device.current,
        "current_device": lambda: 0,
        "device": lambda index: nullcontext(),
        "stream": lambda stream: _THREAD.device.on(stream),
        "synchronize": lambda: _THREAD.device.drain(),
    }
    with mock.patch.multiple(torch.cuda, **stand_ins), mock.patch.object(torch.Tensor, "record_stream", _record_stream):
        yield


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    stream.device.block(tensor, "record_stream").recorded.append(stream)


class Hazard(AssertionError):
    """Something that a GPU would do wrong, in some runs."""


@dataclass
class Block:
    """The memory of a storage: where it was allocated and who has used it since."""

    alive: StorageWeakRef
    stream: int
    what: str
    pinned: bool = False
    written: tuple[int, int] | None = None
    uses: Clock = field(default_factory=dict)
    recorded: list[Stream] = field(default_factory=list)
    """After the release, the allocator waits until these streams have got where they are now."""


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, device: Device, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.number = len(device.streams)
        self.clock: Clock = {}
        device.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.device.sweep()
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.device.sweep()
        _merge(self.clock, other.clock)


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, device: Device, blocking: bool = False) -> None:
        self.device = device
        self.blocking = blocking
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.device.sweep()
        self.clock = dict((stream or self.device.current).clock)

    def synchronize(self) -> None:
        if not self.blocking:
            raise Hazard("the host spins while it waits for an event")
        if self.device.world is not None:
            self.device.world.hold(self.device, self.clock)
        current = self.device.current
        self.device.behind.append(current.clock.get(current.number, 0) - self.clock.get(current.number, 0))
        _merge(self.device.host, self.clock)

    def query(self) -> bool:
        """Over or not: an event that nobody has waited for may be either."""
        world = self.device.world
        unknown = self.device.random.random() < 0.5 if world is None else world.over(self.device, self.clock)
        over = passed(self.device.host, self.clock) or unknown
        if over:
            _merge(self.device.host, self.clock)
        return over


class Device(TorchDispatchMode):
    """One rank's GPU, with the host that drives it."""

    def __init__(self, seed: int = 0, world: World | None = None) -> None:
        super().__init__()
        self.world = world
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.host: Clock = {}
        self.behind: list[int] = []
        """At every wait of the host for an event: operations of the current stream that it need not wait for."""
        self.random = Random(seed)
        self._variants = Random(seed)
        self.may_wait = False
        self.blocks: dict[int, Block] = {}
        self.launches: list[str] = []
        """Names of the kernels that were launched, messages and collectives among them."""
        self.loaded: set[tuple[str, int]] = set()
        """Kernels that have been used."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Tensors are fake and on this device."""
        with stands_in_for_cuda(), self.here():
            yield

    @contextmanager
    def here(self) -> Iterator[None]:
        """`active` for this thread; inside `stands_in_for_cuda`."""
        _THREAD.device = self
        with FakeTensorMode(), self:
            yield
            self.sweep()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As torch.cuda.stream."""
        outer, self.current = self.current, stream
        yield
        self.current = outer

    @contextmanager
    def outside_the_loop(self) -> Iterator[None]:
        """The host may wait for the device."""
        outer, self.may_wait = self.may_wait, True
        yield
        self.may_wait = outer

    def kernel(
        self,
        name: str,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
        meeting: Meeting | None = None,
    ) -> None:
        """Launch something on the current stream; with `meeting` it ends when its peers have got there, too."""
        self.sweep()
        self.launches.append(name)
        variant = name, self._variants.randrange(VARIANTS)
        if variant not in self.loaded:
            self.loaded.add(variant)
            self.host_may_wait(Cause.FIRST_USE)
        stream = self.current
        _merge(stream.clock, self.host)
        reads, writes = ([self.block(tensor, name) for tensor in tensors] for tensors in (reads, writes))
        for block in (*reads, *writes):
            if block.written is not None and not passed(stream.clock, dict([block.written])):
                raise Hazard(f"{name} on stream {stream.number} may come before the write of {block.what}")
        for block in writes:
            if not passed(stream.clock, block.uses):
                raise Hazard(f"{name} on stream {stream.number} may overwrite {block.what} while it is read")
        stamp = stream.number, stream.clock.get(stream.number, 0) + 1
        if self.world is not None:
            self.world.issue(self, stream.number, dict(stream.clock), meeting)
        _merge(stream.clock, dict([stamp]))
        for block in (*reads, *writes):
            _merge(block.uses, dict([stamp]))
        for block in writes:
            block.written = stamp
        self.host_may_wait(Cause.LAUNCH)

    def host_may_wait(self, cause: Cause) -> None:
        """Where a host may have to wait until its device has done all that was issued."""
        if self.world is not None and self.world.waits(self, cause):
            self.drain()

    def drain(self) -> None:
        """As torch.cuda.synchronize."""
        if self.world is None:
            raise Hazard("the host waits for the whole device")
        issued = {stream.number: stream.clock.get(stream.number, 0) for stream in self.streams}
        self.world.hold(self, issued)
        _merge(self.host, issued)

    def read_by_host(self, tensor: torch.Tensor) -> None:
        """The host looks at pinned memory."""
        block = self.block(tensor, "host")
        if block.written is not None and not passed(self.host, dict([block.written])):
            raise Hazard(f"the host reads {block.what} before it is written")

    def block(self, tensor: torch.Tensor, what: str) -> Block:
        """The account of a tensor's memory; a new one belongs to the current stream."""
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self.blocks:
            self.blocks[reference.cdata] = Block(reference, self.current.number, f"{what} {list(tensor.shape)}")
        return self.blocks[reference.cdata]

    def sweep(self) -> None:
        """What has been released since the last look goes back to its stream's pool."""
        for key, block in list(self.blocks.items()):
            if block.alive.expired():
                del self.blocks[key]
                known = dict(self.host)
                for stream in (self.streams[block.stream], *block.recorded):
                    _merge(known, stream.clock)
                if not passed(known, block.uses):
                    raise Hazard(f"{block.what} of stream {block.stream} is released while another stream uses it")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema, name = function._schema, function._schema.name.removeprefix("aten::")
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
        if not self.may_wait and self._waits(name, named):
            raise Hazard(f"the host waits for the device in {name}")
        given = _tensors([*named.values()])
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in given}
        if name in MAKES_ROOM:
            self.host_may_wait(Cause.ALLOCATION)
        result = function(*args, **(kwargs or {}))
        new = [each for each in _tensors(result) if StorageWeakRef(each.untyped_storage()).cdata not in known]
        for each in new:
            self.block(each, name).pinned = bool(named.get("pin_memory"))
        if name in MAKES_ROOM:
            return result
        written = [
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        ]
        changed = _tensors([named[argument] for argument in written if argument in named])
        if new:
            self.host_may_wait(Cause.ALLOCATION)
        if new or changed:  # else a view
            self.kernel(name, given, [*new, *changed])
        return result

    def _waits(self, name: str, named: dict[str, object]) -> bool:
        """Whether the host needs the result, or the end, of an operation on a device.

        A copy from or to host memory that is not pinned is over when the call returns, whatever the caller asks for.
        """
        if name == "copy_":
            source, target = named["src"], named["self"]
            on_host = [each for each in (source, target) if each.device.type == "cpu"]
            pinned = all(self.block(each, name).pinned for each in on_host)
            return source.device != target.device and not (named.get("non_blocking") and pinned)
        if name == "_to_copy":
            source = named["self"]
            pinned = source.is_cuda or self.block(source, name).pinned  # what a device copies to is pinned then
            away = torch.device(named.get("device") or source.device) != source.device
            return away and not (named.get("non_blocking") and pinned)
        by_mask = name.startswith("index") and any(each.dtype == torch.bool for each in _tensors(named.get("indices")))
        return name in WAITS or by_mask


class Work:
    """What Links uses of torch's Work, over an NCCL stream of its own."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        with device.on(stream):
            self._event = Event(device)
            self._event.record()

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._device.current.wait_event(self._event)


class Messages:
    """torch.distributed's isend and irecv over NCCL: every group has a stream, behind the current one at each call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[object, Stream] = {}
        self.sent: defaultdict[object, list[Buffer]] = defaultdict(list)
        self.received: defaultdict[object, list[Buffer]] = defaultdict(list)
        """By group, what went and came."""

    def isend(self, tensor: torch.Tensor, target: int, group: object) -> Work:
        self.sent[group].append(_buffer(tensor))
        return self._on_its_stream(group, "isend", [tensor], [])

    def irecv(self, buffer: torch.Tensor, source: int, group: object) -> Work:
        self.received[group].append(_buffer(buffer))
        return self._on_its_stream(group, "irecv", [], [buffer])

    def _on_its_stream(self, group: object, name: str, reads: list, writes: list) -> Work:
        if group not in self._streams:
            self._streams[group] = Stream(self._device)
        stream = self._streams[group]
        stream.wait_stream(self._device.current)
        with self._device.on(stream):
            self._device.kernel(name, reads, writes, (group, 2))
        return Work(self._device, stream)


class Collectives:
    """A `Communicator`, and the collectives over tensor ranks: kernels on the current stream."""

    def __init__(self, device: Device, rank: int, members: tuple[int, ...]) -> None:
        self._launch = partial(device.kernel, meeting=("vocabulary", len(members)))
        self._launch_over_tensor_ranks = device.kernel
        self._rank, self._members = rank, members
        self.operations: list[tuple[object, ...]] = []
        """What this rank took part in: all members must say the same. Rows of exchanges are in `rows`."""
        self.rows: list[tuple[list[int], list[int]]] = []
        """Of every exchange, what came from and what went to each rank."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        assert root in self._members
        self.operations.append(("broadcast", root, _buffer(tensor)))
        own = self._rank == root
        self._launch("broadcast", [tensor] if own else [], [] if own else [tensor])

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        self.operations.append(("all_gather", _buffer(own)))
        self._launch("all_gather", [own], [gathered])

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        assert root in self._members
        self.operations.append(("reduce", root, _buffer(tensor)))
        self._launch("reduce", [tensor], [tensor])

    def exchange(self, received, sent, incoming, outgoing) -> None:
        assert len(received) == sum(incoming) and len(sent) == sum(outgoing)
        self.operations.append(("exchange", _buffer(received[:0]), _buffer(sent[:0])))
        self.rows.append((list(incoming), list(outgoing)))
        self._launch("exchange", [sent], [received])

    def over_tensor_ranks(self) -> SimpleNamespace:
        """Stands for torch.distributed in `megatron_vp.runtime.collectives`."""
        launch = self._launch_over_tensor_ranks
        return SimpleNamespace(
            all_reduce=lambda tensor, group: launch("all_reduce", [tensor], [tensor]),
            all_gather_into_tensor=lambda gathered, own, group: launch("all_gather", [own], [gathered]),
            reduce_scatter_tensor=lambda part, whole, group: launch("reduce_scatter", [whole], [part]),
        )


class Kernels:
    """The fused `Operations`: one launch each."""

    def __init__(self, device: Device) -> None:
        self._launch: Callable[..., None] = device.kernel

    def exponentiate_(self, logits_nv, labels_n, *others, **named) -> tuple[torch.Tensor, ...]:
        statistics_3n = logits_nv.new_empty((3, len(labels_n)), dtype=torch.float32)
        result = statistics_3n, torch.empty_like(labels_n), torch.empty_like(statistics_3n[0])
        self._launch("exponentiate_", [logits_nv, labels_n], [logits_nv, *result])
        return result

    def fold_(self, total_3n, gathered_r3n) -> None:
        self._launch("fold_", [gathered_r3n], [total_3n])

    def rescale_(self, product_nh, weight_vh, derivative) -> None:
        self._launch("rescale_", [product_nh, weight_vh, *self._read(derivative)], [product_nh])

    def enter_targets_(self, exp_nv, x_nh, token_loss_grad_n, derivative) -> torch.Tensor:
        result = torch.empty_like(x_nh)
        self._launch("enter_targets_", [exp_nv, x_nh, token_loss_grad_n, *self._read(derivative)], [exp_nv, result])
        return result

    def add_product_(self, matrix_vh, left_nv, right_nh) -> None:
        self._launch("add_product_", [left_nv, right_nh, matrix_vh], [matrix_vh])

    def add_rows_(self, matrix_vh, row_n, source_nh, *, sorted_rows=False) -> None:
        self._launch("add_rows_", [row_n, source_nh, matrix_vh], [matrix_vh])

    def sort_by_owner_(self, order_n, counts, tokens_n, spans, vocab_size) -> None:
        self._launch("sort_by_owner_", [tokens_n, spans], [order_n, counts])

    def _read(self, derivative: Derivative) -> list[torch.Tensor]:
        total = derivative.total
        return [derivative.largest_n, derivative.target_n, derivative.target_logit_n, total.max_n, total.sum_n]


def _buffer(tensor: torch.Tensor) -> Buffer:
    return tuple(tensor.shape), tensor.dtype


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


def passed(clock: Clock, other: Clock) -> bool:
    """Whether everything that `other` knows to be over is over for `clock`, too."""
    return all(clock.get(stream, 0) >= count for stream, count in other.items())
