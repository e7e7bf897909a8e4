"""Runs the instructions of a program in order; does not depend on schedules or models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_vp.runtime.progress import Progress
from megatron_vp.schedule.instructions import Instruction, Program
from megatron_vp.schedule.transfers import Operation


class Observer(Protocol):
    """Interface of an object that watches a rank's instructions and operations, such as a recorder."""

    def watch(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Return a context manager around an instruction: reading data, a pass, the loss function, a post or a wait."""

    def communicating(self, operation: Operation) -> AbstractContextManager[None]:
        """Return a context manager around an operation, for use on the operation's stream or, on CPU, in its thread."""


class Unobserved:
    """An observer that does nothing."""

    _NOTHING = contextlib.nullcontext()

    def watch(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return self._NOTHING

    def communicating(self, operation: Operation) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return self._NOTHING


Handler = Callable[[Any], None]


def execute(program: Program, handlers: Mapping[type, Handler], observer: Observer, progress: Progress) -> None:
    """Run every instruction of `program` in order, with one handler for each kind of instruction."""
    for instruction in program.instructions:
        progress.at(instruction)
        with observer.watch(instruction):
            handlers[type(instruction)](instruction)
