"""Replays a rank without computing: tensors have shapes but no contents, so that a rank of even a very large job fits
on a laptop.

All tensors are PyTorch's fake tensors. The rank builds the same layers and the same optimizer as in the job, and runs
the same program including autograd, but computes nothing. The replay counts the bytes of all live storages. It does not
count allocator overhead (rounding, fragmentation), library workspaces, or communicators.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_vp.errors import UserError
from megatron_vp.mcore.replay.device_kernels import device_kernels
from megatron_vp.mcore.settled import process

_READ = torch.ops.aten._local_scalar_dense.default


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that are alive inside a `FakeTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0
        self.peak = 0
        self._alive: set[int] = set()

    def restart(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        self.peak = self.allocated

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            return _communicated(function, args)
        if function is _READ:
            return _read(function, *args)
        try:
            results = function(*args, **(kwargs or {}))
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise UserError(
                f"--shapes-only cannot determine the shape of the result of {function}, because it depends on values: "
                "replay on a GPU, without --shapes-only"
            ) from error
        return self._counted(results, FakeTensor)

    def _counted(self, results: Any, kind: type[torch.Tensor]) -> Any:
        for result in tree_iter(results):
            # Tensors on the meta device stand for host memory; see `HostMemory`.
            if isinstance(result, kind) and result.device.type != "meta":
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        # PyTorch keeps the object `storage` until its memory is no longer used; then, `_release` runs.
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self.allocated -= size


def _communicated(function: Any, args: tuple[Any, ...]) -> Any:
    """Skip a collective or point-to-point operation: return its buffers (the first argument) unchanged."""
    from torch._C._distributed_c10d import FakeWork  # Some supported versions of PyTorch lack FakeWork.

    results = [FakeWork().boxed() if "Work" in str(result.type) else args[0] for result in function._schema.returns]
    return results[0] if len(results) == 1 else tuple(results) if results else None


def _read(function: Any, tensor: torch.Tensor) -> Any:
    """Return the value that the host reads. An unknown value becomes NaN, False or 0.

    Megatron's checks for NaN pass, because they read only the result of `isnan`, which becomes False.
    """
    try:
        return function(tensor)
    except DataDependentOutputException:
        if tensor.is_floating_point():
            return float("nan")
        return False if tensor.dtype is torch.bool else 0


@contextlib.contextmanager
def silent(errors: bool = False) -> Iterator[None]:
    """Hide what libraries print, and with `errors` also what they print on standard error: times and norms have no
    meaning for fake tensors.
    """
    with contextlib.ExitStack() as undo:
        nowhere = undo.enter_context(open(os.devnull, "w"))
        undo.enter_context(contextlib.redirect_stdout(nowhere))
        if errors:
            undo.enter_context(contextlib.redirect_stderr(nowhere))
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        undo.callback(logging.disable, logging.NOTSET)
        logging.disable(logging.CRITICAL if errors else logging.WARNING)
        yield


@contextlib.contextmanager
def fake_tensors(engine: bool = False) -> Iterator[None]:
    """Inside this context, every tensor is a fake tensor, and its memory is counted. Tensors that are cached inside the
    context stay fake afterwards.

    `engine`: whether local layers save the same tensors as Transformer Engine's layers would save.
    """
    live = LiveStorages()
    with (
        device_kernels(),
        # PyTorch's `_apply`, which moves and converts models, would swap fake parameters with their converted copies.
        # The swap would fail, because weak references to the parameters exist.
        mock.patch.object(torch.nn.Module, "_apply", _in_place),
        # PyTorch gathers objects as bytes, which fake tensors do not have. Return this rank's object for every rank.
        mock.patch.object(torch.distributed, "all_gather_object", _own_everywhere),
        mock.patch.multiple(process, meter=live, counts_engine=engine),
        FakeTensorMode(allow_non_fake_inputs=True),
        live,
    ):
        yield


def _in_place(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    for each in module.modules() if recurse else (module,):
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None:
                tensor.data = fn(tensor.data)
    return module


def _own_everywhere(object_list: list[Any], obj: Any, *_others: Any, **_named: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _untracked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fork(self: Any, name: str = "model-parallel-rng") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return fork
