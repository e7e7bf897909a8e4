"""The runtime with its real streams and kernels, p ranks on one GPU; without one, the same ranks on CPU."""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
from unittest import mock

import pytest
import torch

from tests.gpu.staged import ranks_share
from tests.harness import ranks
from tests.runtime.toy import reference, run_pipeline

STEPS = [(1, True), (3, False), (2, True), (6, True)]
TIMEOUT = 80
"""Seconds for the ranks of a case on a GPU, which start from nothing."""
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-2}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [pytest.param("cuda", marks=needs_gpu), "cpu"]


def shared_device(rank: int, world: int, device: str, dtype: torch.dtype, schedule: str, method: str) -> list:
    """`run_pipeline` with all ranks on one device; ranks that hang say where before they are given up."""
    faulthandler.dump_traceback_later(0.7 * TIMEOUT, file=sys.stderr)
    with ranks_share(torch.device(device, 0) if device == "cuda" else torch.device(device)):
        return run_pipeline(rank, world, schedule, method, STEPS, False, device=device, dtype=dtype)


def _run(device: str, dtype: torch.dtype, world: int, schedule: str, method: str) -> list:
    # A CUDA context does not survive a fork.
    context = mock.patch.object(ranks, "_server", lambda: multiprocessing.get_context("spawn"))
    case = (world, shared_device, device, dtype, schedule, method)
    if device == "cpu":
        return ranks.run_ranks(*case)
    with context:
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
@pytest.mark.parametrize("dtype", BOUND)
def test_two_runs_give_the_same_bits(dtype):
    first, second = (_run("cuda", dtype, 3, "1f1b", "vocab-2") for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        for (losses, gradients, *_), (other_losses, other_gradients, *_) in zip(ours, theirs, strict=True):
            assert losses == other_losses
            assert all(gradients[name] is None or gradients[name].equal(other_gradients[name]) for name in gradients)
