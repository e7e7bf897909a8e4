"""The loop over a program's instructions. It knows neither schedules nor models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_vp.schedule.instructions import Program, Run
from megatron_vp.schedule.passes import Pass


class Observer(Protocol):
    """Watches the passes of a rank: clocks, traces."""

    def watch(self, action: Pass) -> AbstractContextManager[None]:
        """A context that spans the pass."""


class Unobserved:
    """The observer that does nothing."""

    def watch(self, action: Pass) -> AbstractContextManager[None]:
        """No context."""
        return contextlib.nullcontext()


Handler = Callable[[Any], None]


def execute(program: Program, handlers: Mapping[type, Handler], observer: Observer) -> None:
    """Run every instruction of `program` in order, one handler a kind of instruction."""
    for instruction in program.instructions:
        handler = handlers[type(instruction)]
        if isinstance(instruction, Run):
            with observer.watch(instruction.action):
                handler(instruction)
        else:
            handler(instruction)
