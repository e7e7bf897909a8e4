"""Test the common time axis: clocks agree, and device times are converted to host times."""

import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_vp.runtime import trace_writer
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule.instructions import Run
from megatron_vp.schedule.passes import Pass, PassKind
from tests.harness.ranks import process_group, run_ranks

SKEW = 5_000_000_000


def compare(rank, world, same_host):
    """This rank's alignment, with a clock that is `rank` x SKEW ahead unless the ranks share a host."""
    shifted = SimpleNamespace(
        perf_counter_ns=lambda: time.perf_counter_ns() + (0 if same_host else rank * SKEW), time_ns=time.time_ns
    )
    boot = trace_writer._BOOT if same_host else Path("no such file")
    with (
        process_group(rank, world),
        mock.patch.object(trace_writer, "time", shifted),
        mock.patch.object(trace_writer, "_BOOT", boot),
    ):
        alignment = trace_writer.align(PipelineGroups.create([range(world)], []).pipeline)
        dist.barrier()
        return alignment


def test_clocks_of_other_hosts_are_off_by_little():
    found = run_ranks(3, compare, False, timeout=60)
    for rank, (offset, *_) in enumerate(found):
        assert abs(offset + rank * SKEW) < SKEW / 10
    assert len({found[rank][1:] for rank in range(3)}) == 1


def test_the_clock_of_one_host_needs_no_correction():
    assert [offset for offset, *_ in run_ranks(2, compare, True, timeout=60)] == [0, 0]


class FakeEvent:
    """A CUDA event on a device whose clock counts 3 ms from one event to the next."""

    count = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.count = FakeEvent.count + 3

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at - self.at)


def test_device_times_are_placed_on_the_clock_of_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = time.perf_counter_ns()
    recorder = Recorder(torch.device("cuda"))
    after = time.perf_counter_ns()
    with recorder.span(Run(Pass(PassKind.F, 0))):
        pass
    recorder.finish()
    (span,) = recorder.spans
    # The anchor is the first event, the span the second and the third.
    assert before <= span.start - 3_000_000 <= after
    assert span.end - span.start == 3_000_000 and span.computed == 3
    assert recorder.milliseconds == pytest.approx((time.perf_counter_ns() - before) / 1e6, abs=50)
