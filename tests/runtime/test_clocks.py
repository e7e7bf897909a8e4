"""Test that device times are converted to host times."""

import time

import pytest
import torch

from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule.instructions import Run
from megatron_vp.schedule.passes import Pass, PassKind


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
    before = time.time_ns()
    recorder = Recorder(torch.device("cuda"))
    after = time.time_ns()
    with recorder.span(Run(Pass(PassKind.F, 0))):
        pass
    recorder.finish()
    (span,) = recorder.spans
    # The anchor is the first event, the span the second and the third.
    assert before <= span.start - 3_000_000 <= after
    assert span.end - span.start == 3_000_000 and span.computed == 3
    assert recorder.milliseconds == pytest.approx((time.time_ns() - before) / 1e6, abs=50)
