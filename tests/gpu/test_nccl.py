"""Test the runtime over NCCL, with one rank per GPU, or with all ranks on a single GPU.

NCCL refuses two ranks of one host on one GPU, and recognizes a host by a hash, which NCCL_HOSTID replaces. Without a
GPU, the same ranks and programs run on CPU over gloo, which only checks the tests themselves.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import warnings
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_vp.runtime.groups import CTAS, EDGE_CTAS, PipelineGroups, _nccl_options
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.streams import second_stream
from megatron_vp.runtime.watchdog import Watchdog
from megatron_vp.schedule import lower
from tests.harness import ranks
from tests.runtime import toy
from tests.runtime.toy import reference, run_pipeline
from tests.schedule.early_receives import with_early_receives

STEPS = [(3, True), (2, True), (4, True)]
TIMEOUT = 150
"""Seconds for the ranks of a case on GPUs, which start from nothing and connect."""
LIMIT = 40
"""Seconds in one place of the schedule after which a rank says so and ends."""
STUCK = r"error: rank \d (was|waited) .* \(\d+ s\)"

DEVICES = torch.cuda.device_count() if dist.is_nccl_available() else 0
needs_one = pytest.mark.skipif(DEVICES < 1, reason="needs a GPU and NCCL")


def train(rank: int, world: int, backend: str, schedule: str, method: str, early: bool = False) -> list:
    """`run_pipeline` with a device for each rank; ranks that hang say where and end."""

    class Watched(Pipeline):
        def __init__(self, groups: PipelineGroups) -> None:
            super().__init__(groups)
            Watchdog(self.progress, LIMIT, LIMIT).start()

    faulthandler.dump_traceback_later(0.8 * TIMEOUT, file=sys.stderr)
    device = "cpu"
    if backend == "nccl":
        if world > DEVICES:
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        device = f"cuda:{rank % DEVICES}"
        torch.cuda.set_device(device)
    with ExitStack() as around:
        around.enter_context(mock.patch.object(toy, "process_group", _over(backend)))
        around.enter_context(mock.patch.object(toy, "Pipeline", Watched))
        if early:
            around.enter_context(mock.patch.object(toy, "lower", lambda *given: with_early_receives(lower(*given))))
        dtype = torch.float32 if backend == "nccl" else torch.float64
        return run_pipeline(rank, world, schedule, method, STEPS, False, device=device, dtype=dtype)


def _over(backend: str):
    class Group:
        def __init__(self, rank: int, world: int) -> None:
            self._rank, self._world = rank, world

        def __enter__(self) -> None:
            dist.init_process_group(
                backend, rank=self._rank, world_size=self._world, timeout=timedelta(seconds=0.9 * TIMEOUT)
            )

        def __exit__(self, kind: object, *_: object) -> None:
            if kind is None:
                dist.destroy_process_group()

    return Group


def _run(backend: str, world: int, function: object, *arguments: object, blocking: bool = False) -> list:
    if backend == "gloo":
        return ranks.run_ranks(world, function, backend, *arguments)
    with (
        mock.patch.dict(os.environ, {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}),
        # A CUDA context does not survive a fork.
        mock.patch.object(ranks, "_server", lambda: multiprocessing.get_context("spawn")),
    ):
        return ranks.run_ranks(world, function, backend, *arguments, timeout=TIMEOUT)


def _assert_as_reference(found: list, stages: int, dtype: torch.dtype, bound: float) -> None:
    for iteration, (microbatches, _) in enumerate(STEPS):
        losses, expected = reference(stages, microbatches, iteration, False, dtype)
        assert found[-1][iteration][0] == pytest.approx(losses, rel=bound)
        for name, gradient in expected.items():
            parts = [each[iteration][1][name] for each in found if name in each[iteration][1]]
            assert parts, name
            assert (torch.cat(parts).double() - gradient).norm() <= bound * gradient.norm(), (name, iteration)


RUNS = [
    pytest.param("nccl", blocking, *case, marks=needs_one, id="-".join((job, *case)))
    for job, blocking in (("nccl", False), ("nccl, CUDA_LAUNCH_BLOCKING=1", True))
    for case in product(("1f1b", "v-half"), ("vocab-1", "vocab-2"))
]
RUNS += [
    pytest.param("gloo", False, *case, marks=pytest.mark.slow) for case in (("1f1b", "vocab-2"), ("v-half", "vocab-1"))
]


@pytest.mark.parametrize(("backend", "blocking", "schedule", "method"), RUNS)
def test_three_iterations_give_the_losses_of_one_process(backend, schedule, method, blocking):
    world = 2
    stages = 2 * world if schedule == "v-half" else world
    found = _run(backend, world, train, schedule, method, blocking=blocking)
    dtype, bound = (torch.float32, 2e-6) if backend == "nccl" else (torch.float64, 1e-12)
    _assert_as_reference(found, stages, dtype, bound)


@needs_one
def test_with_early_receives_launches_that_block_hang():
    """The control: the watchdog ends the ranks, and the test says so."""
    with pytest.raises(ranks.RankError, match=STUCK):
        _run("nccl", 2, train, "1f1b", "vocab-1", True, blocking=True)


def alone(rank: int, world: int, backend: str) -> dict[str, object]:
    """Every operation of a communicator on the second stream, in a world of one; and how its groups were made."""
    made: list[object] = []
    new_group = dist.new_group

    def noted(*arguments: object, **named: object) -> dist.ProcessGroup:
        if "pg_options" in named:  # not the group over which hosts compare requests
            made.append(named["pg_options"])
        return new_group(*arguments, **named)

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    with warnings.catch_warnings(record=True) as warned, _over(backend)(rank, world):
        warnings.simplefilter("always")
        with mock.patch.object(dist, "new_group", noted):
            groups = PipelineGroups.create([[0]], [], timedelta(seconds=60))
            # A rank has no edge to itself.
            limit = timedelta(seconds=60)
            edge = dist.new_group([0], limit, pg_options=_nccl_options(limit, EDGE_CTAS))
        stream, communicator = second_stream(device), groups.vocabulary
        sent = torch.arange(6.0, device=device).view(3, 2)
        results = {name: torch.full_like(sent, -1) for name in ("broadcast", "reduce", "exchange")}
        gathered = torch.full((1, 3, 2), -1.0, device=device)

        def operations() -> None:
            for name in ("broadcast", "reduce"):
                results[name].copy_(sent)
                getattr(communicator, name)(results[name], 0)
            communicator.all_gather(gathered, sent)
            communicator.exchange(results["exchange"], sent, [3], [3])

        event = stream.submit(operations)
        event.host_wait()
        event.wait()
        dist.all_reduce(gathered, group=edge)
        found = {name: tensor.cpu() for name, tensor in (results | {"all_gather": gathered[0]}).items()}
        options = [
            None
            if each is None
            else (each.config.max_ctas, each.is_high_priority_stream, getattr(each, "lazy_init", True), each._timeout)
            for each in made
        ]
        said = [str(each.message) for each in warned if "group" in str(each.message).lower()]
        return {"found": found, "options": options, "said": said}


@pytest.mark.parametrize("backend", [pytest.param("nccl", marks=needs_one), "gloo"])
def test_a_world_of_one(backend):
    [result] = _run(backend, 1, alone)
    expected = torch.arange(6.0).view(3, 2)
    assert set(result["found"]) == {"broadcast", "reduce", "all_gather", "exchange"}
    for name, tensor in result["found"].items():
        assert tensor.equal(expected), name
    limit = timedelta(seconds=60)
    ours = [(CTAS, True, True, limit), (EDGE_CTAS, True, True, limit)] if backend == "nccl" else [None, None]
    assert result["options"] == ours
    assert result["said"] == []
