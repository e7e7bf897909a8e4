"""Test the runtime with real streams and kernels and p ranks on one GPU, or on CPU without a GPU."""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from unittest import mock

import pytest
import torch

from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.watchdog import Watchdog
from megatron_vp.schedule import lower
from tests.gpu.staged import ranks_share
from tests.harness import ranks
from tests.runtime import toy
from tests.runtime.toy import reference, run_pipeline
from tests.schedule.early_receives import with_early_receives

STEPS = [(1, True), (3, False), (2, True), (6, True)]
TIMEOUT = 80
"""Seconds for the ranks of a case on a GPU, which start from nothing."""
LIMIT = 40
"""Seconds in one place of the schedule after which a rank says so and ends."""
STUCK = r"error: rank \d (was|waited) .* \(\d+ s\)"
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-2}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [pytest.param("cuda", marks=needs_gpu), "cpu"]


class HostWaits(Enum):
    """Where hosts wait until their device is idle."""

    NEVER = "never"
    AFTER_PASSES = "after every pass of the model"


def shared_device(
    rank: int,
    world: int,
    device: str,
    dtype: torch.dtype,
    schedule: str,
    method: str,
    waits: HostWaits = HostWaits.NEVER,
    early_receives: bool = False,
    limit: float = LIMIT,
) -> list:
    """`run_pipeline` with all ranks on one device; ranks that hang say where before they are given up."""

    class Watched(Pipeline):
        def __init__(self, groups: PipelineGroups) -> None:
            super().__init__(groups)
            Watchdog(self.progress, limit, limit).start()

    faulthandler.dump_traceback_later(0.7 * TIMEOUT, file=sys.stderr)
    with ExitStack() as around:
        around.enter_context(ranks_share(torch.device(device, 0) if device == "cuda" else torch.device(device)))
        around.enter_context(mock.patch.object(toy, "Pipeline", Watched))
        if early_receives:
            written = lambda *arguments: with_early_receives(lower(*arguments))  # noqa: E731
            around.enter_context(mock.patch.object(toy, "lower", written))
        if waits is HostWaits.AFTER_PASSES:
            for name in ("forward", "backward", "weight_gradient", "loss"):
                around.enter_context(mock.patch.object(toy.ToyModel, name, _waiting(getattr(toy.ToyModel, name))))
        return run_pipeline(rank, world, schedule, method, STEPS, False, device=device, dtype=dtype)


def _waiting(run_pass: Callable) -> Callable:
    def run(*arguments: object) -> object:
        result = run_pass(*arguments)
        torch.cuda.synchronize()
        return result

    return run


def _run(
    device: str,
    dtype: torch.dtype,
    world: int,
    schedule: str,
    method: str,
    waits: HostWaits = HostWaits.NEVER,
    early_receives: bool = False,
    limit: float = LIMIT,
) -> list:
    case = (world, shared_device, device, dtype, schedule, method, waits, early_receives, limit)
    if device == "cpu":
        return ranks.run_ranks(*case)
    # A CUDA context does not survive a fork.
    with mock.patch.object(ranks, "_server", lambda: multiprocessing.get_context("spawn")):
        return ranks.run_ranks(*case, timeout=TIMEOUT)


CASES = [
    ("1f1b", 2, "vocab-2", torch.float32),
    ("1f1b", 3, "vocab-1", torch.bfloat16),
    ("zb-h1", 4, "vocab-2", torch.bfloat16),
    ("zb-h1", 2, "vocab-1", torch.float32),
]
NAMES = ["two ranks, 1f1b", "three ranks", "four ranks", "two ranks, split"]


@pytest.mark.parametrize(("schedule", "world", "method", "dtype"), CASES, ids=NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_losses_and_gradients(device, schedule, world, method, dtype):
    found = _run(device, dtype, world, schedule, method)
    for iteration, (microbatches, gradients) in enumerate(STEPS):
        losses, expected = reference(world, microbatches, iteration, False, dtype)
        assert found[-1][iteration][0] == pytest.approx(losses, rel=BOUND[dtype])
        if not gradients:
            continue
        for name, gradient in expected.items():
            parts = [each[iteration][1][name] for each in found if name in each[iteration][1]]
            distance = (torch.cat(parts).double() - gradient).norm() / gradient.norm()
            assert distance <= BOUND[dtype], (name, iteration, distance)


@needs_gpu
def test_two_runs_give_the_same_bits():
    first, second = (_run("cuda", torch.bfloat16, 3, "1f1b", "vocab-2") for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        for (losses, gradients, *_), (other_losses, other_gradients, *_) in zip(ours, theirs, strict=True):
            assert losses == other_losses
            assert all(gradients[name] is None or gradients[name].equal(other_gradients[name]) for name in gradients)


@needs_gpu
def test_hosts_may_wait_for_the_device():
    _run("cuda", torch.float32, 3, "1f1b", "vocab-1", HostWaits.AFTER_PASSES)


@needs_gpu
def test_with_early_receives_hosts_that_wait_hang():
    """The control: a test that cannot hang shows nothing."""
    with pytest.raises(ranks.RankError, match=STUCK):
        _run("cuda", torch.float32, 3, "1f1b", "vocab-1", HostWaits.AFTER_PASSES, early_receives=True, limit=20)
