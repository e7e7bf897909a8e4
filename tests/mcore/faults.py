"""Faults during training: in the third iteration, a rank dies, stalls, fails or computes wrong numbers.

From the second iteration on, Megatron checks losses, and the short time limit holds.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

from tests.harness.training import tiny_model

ITERATION = 2
"""Iterations that are done when the fault happens."""
LIMIT = 5
"""Seconds that a rank may be in one place from the second iteration on."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    act: called when it is time; what it returns, if anything, is applied to the result of the function.
    rank: global.
    where: a function of the rank: `F` of `chunk`, its `tokens` or `labels`, or the user's `loss` function.
    microbatches: in which.
    """

    act: Callable[[], Callable | None]
    rank: int
    where: str
    microbatches: tuple[int, ...] = (2,)
    chunk: int = 0


def die() -> None:
    """As by the kernel's hand."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stand still, connections open."""
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate() -> None:
    """What a scheduler sends before the time is up."""
    os.kill(os.getpid(), signal.SIGTERM)


def hang() -> None:
    """Wait for something that does not come."""
    time.sleep(1000)


def fail() -> None:
    """A defect."""
    raise RuntimeError("a defect")


def times(factor: float) -> Callable:
    """Results that are no finite numbers."""
    return lambda result: result * factor


def to_nan() -> Callable:
    """NaN."""
    return times(float("nan"))


def to_infinity() -> Callable:
    """Infinity."""
    return times(float("inf"))


def to_a_large_id() -> Callable:
    """An id that a vocabulary of 512 does not have."""
    return lambda ids: ids.fill_(512)


def train_with_fault(rank: int, _world_size: int, arguments: list[str], fault: Fault | None = None) -> None:
    """Train as the script does, and end as it does."""
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    script.prepare()
    with injected(fault, rank), script.one_line_errors():
        try:
            script.main()
        except SystemExit as end:
            os._exit(end.code or 0)


def injected(fault: Fault | None, rank: int) -> ExitStack:
    """The rank's code with the fault in it, if any."""
    stack = ExitStack()
    if fault is None:
        return stack
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    import pretrain_gpt_vp as script
    from megatron_vp.mcore.training.megatron_model import MegatronModel

    def strike(microbatch: int) -> Callable | None:
        if rank == fault.rank and microbatch in fault.microbatches and get_args().curr_iteration == ITERATION:
            return fault.act()
        return None

    def forward(original, self, chunk, microbatch, *args):
        change = strike(microbatch) if chunk == fault.chunk else None
        if change is None:
            return original(self, chunk, microbatch, *args)
        core = self._chunks[chunk].core
        handle = core.register_forward_hook(lambda _module, _inputs, output: change(output))
        try:
            return original(self, chunk, microbatch, *args)
        finally:
            handle.remove()

    def ids(original, self, microbatch):
        result = original(self, microbatch)
        change = strike(microbatch)
        return result if change is None else change(result)

    calls = itertools.count()

    def loss(original, mask, token_loss):
        change = strike(next(calls) % get_num_microbatches())
        return original(mask, token_loss if change is None else change(token_loss))

    owner, name, faulty = {
        "F": (MegatronModel, "forward", forward),
        "tokens": (MegatronModel, "tokens", ids),
        "labels": (MegatronModel, "labels", ids),
        "loss": (script, "loss_func", loss),
    }[fault.where]
    original = getattr(owner, name)
    stack.enter_context(mock.patch.object(owner, name, lambda *args: faulty(original, *args)))
    return stack


def few_steps(**changes: object) -> list[str]:
    """Arguments of five iterations of four microbatches on two stages, where nobody waits for long."""
    return tiny_model(
        **{
            "pipeline_model_parallel_size": 2,
            "vocab_parallel": True,
            "train_iters": 5,
            "distributed_timeout_seconds_after_init": LIMIT,
            **changes,
        }
    )


def refusal(ends: list[tuple[int | None, str]]) -> str:
    """The line by which one rank says for all why they end with status 2; `ends` are statuses and outputs by rank."""
    assert {status for status, _ in ends} == {2} and not any("Traceback" in output for _, output in ends), ends
    (line,) = (line for _, output in ends for line in errors(output))
    return line


def errors(output: str) -> list[str]:
    """The lines in which a rank's output says what is wrong."""
    return re.findall(r"^(?:rank \d+: )?error: (.*)", output, re.M)
