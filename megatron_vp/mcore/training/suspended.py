"""Suspends a user's `forward_step` inside its call of the model, until the schedule has computed the model's output.

Some loops go on computing with the output in `forward_step` itself, but the schedule needs the data of later
microbatches before the output exists. Such a `forward_step` runs in a thread of its own. Only one of the two threads
runs at any time: the other one waits for it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from megatron_vp.errors import UserError

WAITS = object()
"""What `start` returns if `forward_step` waits for the model's output."""


class _Abandoned(BaseException):
    """Ends a `forward_step` whose iteration has failed."""


class Suspended:
    """A call of `forward_step` that stops in `wait_for_output`, which the model's stand-in calls."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Any = call
        self._enter_modes = _modes()
        self._context = contextvars.copy_context()
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._said: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._ends = False
        self._thread = Thread(target=self._run, name="megatron_vp forward_step", daemon=True)

    def start(self) -> Any:
        """Run `forward_step` until it needs the output, and return WAITS; or return its result, if it needs none."""
        self._thread.start()
        return self._listen()

    def resume(self, output: Any) -> Any:
        """Run the rest of `forward_step` with the model's output, and return its result."""
        self._given.put(output)
        returned = self._listen()
        if returned is WAITS:
            raise UserError(
                "this forward_step called the model 2 times, but the schedule runs one call per microbatch: call the "
                "model exactly once, or leave --vocab-parallel and --pipeline-schedule out"
            )
        return returned

    def wait_for_output(self) -> Any:
        """Let the schedule go on until it has computed the model's output, and return the output."""
        self._said.put((WAITS, None))
        output = self._given.get()
        if self._ends:
            raise _Abandoned
        return output

    def abandon(self) -> None:
        """End the thread if it still waits. Its `finally` clauses run."""
        self._ends = True
        for _ in range(10):
            if self._thread.is_alive():
                self._given.put(None)
                self._thread.join(timeout=1)

    def _listen(self) -> Any:
        returned, error = self._said.get()
        if returned is not WAITS:
            self._thread.join()
        if error is not None:
            raise error
        return returned

    def _run(self) -> None:
        call, self._call = self._call, None  # The call refers to this object: break the cycle.
        try:
            with ExitStack() as modes:
                self._enter_modes(modes)
                returned = self._context.run(call)
        except _Abandoned:
            return
        except BaseException as error:
            self._said.put((None, error))
        else:
            self._said.put((returned, None))


def _modes() -> Callable[[ExitStack], None]:
    """Return a function that gives another thread this thread's modes, device and stream."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    casts = [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in kinds]
    caches = torch.is_autocast_cache_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def enter(modes: ExitStack) -> None:
        modes.enter_context(torch.inference_mode(inference))
        modes.enter_context(torch.set_grad_enabled(grad))
        for each in casts:
            modes.enter_context(torch.autocast(*each, cache_enabled=caches))
        modes.enter_context(torch.cuda.stream(stream))

    return enter
