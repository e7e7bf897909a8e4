"""The loop over a program's instructions. It knows neither schedules nor models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_vp.runtime.progress import Progress
from megatron_vp.schedule.instructions import Instruction, Program
from megatron_vp.schedule.transfers import Operation


class Observer(Protocol):
    """Watches what a rank does: clocks, traces."""

    def watch(self, instruction: Instruction) -> AbstractContextManager[None]:
        """A context that spans an instruction: reading data, a pass, the loss function, a post, a wait."""

    def communicating(self, operation: Operation) -> AbstractContextManager[None]:
        """A context that spans an operation where it runs: entered on the second stream, on CPU in its thread."""


class Unobserved:
    """The observer that does nothing."""

    _NOTHING = contextlib.nullcontext()

    def watch(self, instruction: Instruction) -> AbstractContextManager[None]:
        """No context."""
        return self._NOTHING

    def communicating(self, operation: Operation) -> AbstractContextManager[None]:
        """No context."""
        return self._NOTHING


Handler = Callable[[Any], None]


def execute(program: Program, handlers: Mapping[type, Handler], observer: Observer, progress: Progress) -> None:
    """Run every instruction of `program` in order, one handler a kind of instruction."""
    for instruction in program.instructions:
        progress.at(instruction)
        with observer.watch(instruction):
            handlers[type(instruction)](instruction)
