"""Runs the instructions of a program in order; does not depend on schedules or models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_vp.runtime.progress import Progress
from megatron_vp.schedule.instructions import Instruction, Program
from megatron_vp.schedule.transfers import Operation

Observer = Callable[[Instruction | Operation], AbstractContextManager[None]]
"""Returns a context manager around an instruction or an operation, such as a recorder's `span`. The context of an
operation is entered on the operation's stream or, on CPU, in its thread.
"""


def unobserved(_work: Instruction | Operation) -> AbstractContextManager[None]:
    """An `Observer` that does nothing."""
    return nullcontext()


def execute(
    program: Program, handlers: Mapping[type, Callable[[Any], None]], observer: Observer, progress: Progress
) -> None:
    """Run every instruction of `program` in order, with one handler for each kind of instruction."""
    for instruction in program.instructions:
        progress.at(instruction)
        with observer(instruction):
            handlers[type(instruction)](instruction)
