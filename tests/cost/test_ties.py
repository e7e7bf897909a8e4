"""Test how much memory a recommended run leaves free."""

from dataclasses import replace

import pytest

from megatron_vp.cli.planning import Request, memory_used, read_cluster
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.planning.choice import judge
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.schedule import VocabMethod
from tests.cost.small_job import CONFIGS


def asked(hardware="h100", *flags):
    return Request.of(*read_cluster([CONFIGS / "llama3_8b.yaml"], flags, hardware, None, None))


@pytest.fixture(scope="module")
def runs():
    """Two runs of the small job, the fastest first: which has more memory is up to the test."""
    request = asked()
    plans = [Plan("zb-h1", VocabMethod.VOCAB_2), Plan("v-half", VocabMethod.VOCAB_2)]
    made = [evaluate(each, replace(request.job, microbatches=8), request.hardware) for each in plans]
    return request, made


def with_peak(each, gib, seconds):
    """`each` with that memory on its fullest rank."""
    rank = max(each.memory, key=lambda one: one.total)
    memory = (replace(rank, activations=rank.activations + gib * 2**30 - rank.total),)
    made = replace(each, memory=memory, iteration_seconds=seconds)
    # What lies outside the allocator grows with what it holds.
    assert made.peak_memory == pytest.approx(gib * 2**30, rel=0.05)
    return made


def test_equally_fast_runs_that_leave_room_come_first(runs):
    _, (first, second) = runs
    full, roomy = with_peak(first, 60, 1.0), with_peak(second, 40, 1.009)
    limit = full.peak_memory * 1.02
    assert full.is_tight(limit) and full.fits(limit) and not full.is_tight(full.peak_memory * 1.04)
    assert judge([full, roomy], limit).best is roomy
    assert judge([full, roomy], 2 * limit).best is full
    assert judge([full, replace(roomy, iteration_seconds=1.02)], limit).best is full


def test_a_run_that_hardly_fits_is_said_to_perhaps_not_fit(runs):
    _, (split, plain) = runs
    full, roomy = with_peak(plain, 60, 1.0), with_peak(split, 40, 1.1)
    line = memory_used(full, full.peak_memory + 2**30)
    assert "fits into" in line and "unless predicted memory is 3 % too low" in line and "plan --search" in line
    assert "too low" not in memory_used(roomy, full.peak_memory)
    assert "does not fit" in memory_used(full, full.peak_memory - 1)
