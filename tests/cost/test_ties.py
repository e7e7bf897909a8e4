"""Test how much runs may differ and still count as tied, and how much memory a recommended run leaves free."""

from dataclasses import replace

import pytest

from megatron_vp.cli.planning import Request, memory_used, read_cluster
from megatron_vp.cost.hardware.constants import ERROR_BAND, compared
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.planning.candidates import Candidate
from megatron_vp.cost.planning.choice import choose, tie_band
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.schedule import VocabMethod
from tests.cost.small_job import CONFIGS

EXPERTS = ["--num-experts", "8", "--moe-router-topk", "2"]


def asked(hardware="h100", *flags):
    return Request.of(*read_cluster([CONFIGS / "llama3_8b.yaml"], flags, hardware, None, None))


@pytest.mark.parametrize(
    ("hardware", "flags", "kind"),
    [
        ("a100", [], None),
        ("a100", ["--tensor-model-parallel-size", "2"], ("a100", False, False)),
        ("h100", ["--fp8-format", "hybrid"], ("h100", True, False)),
        ("h100", EXPERTS, ("h100", False, True)),
        ("b200", EXPERTS, ("h100", False, True)),
    ],
)
def test_a_tie_is_as_wide_as_the_error_of_the_kind(hardware, flags, kind):
    request = asked(hardware, *flags)
    expected = ERROR_BAND["time"] if kind is None else compared(*kind).mean / 100
    assert tie_band(request.job, request.hardware) == expected


def test_a_kind_that_is_known_better_than_the_papers_setups_is_not_trusted_more():
    assert compared("h100", False, False).mean < 100 * ERROR_BAND["time"]
    assert tie_band(asked().job, asked().hardware) == ERROR_BAND["time"]


@pytest.fixture(scope="module")
def runs():
    """Two runs of the small job, the fastest first: which has more memory is up to the test."""
    request = asked()
    plans = [Candidate("vocab-2", Plan("1f1b", VocabMethod.VOCAB_2)), Candidate("plain", Plan("1f1b"))]
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
    _, (split, plain) = runs
    full, roomy = with_peak(plain, 60, 1.0), with_peak(split, 40, 1.02)
    limit = full.peak_memory * 1.02
    assert full.is_tight(limit) and full.fits(limit) and not full.is_tight(full.peak_memory * 1.04)
    assert choose([full, roomy], limit, 0.03).chosen is roomy
    assert choose([full, roomy], 2 * limit, 0.03).chosen is full
    assert choose([full, roomy], limit, 0.01).chosen is full


def test_a_run_that_hardly_fits_is_said_to_perhaps_not_fit(runs):
    _, (split, plain) = runs
    full, roomy = with_peak(plain, 60, 1.0), with_peak(split, 40, 1.1)
    line = memory_used(full, full.peak_memory + 2**30)
    assert "fits into" in line and "unless predicted memory is 3 % too low" in line and "plan --search" in line
    assert "too low" not in memory_used(roomy, full.peak_memory)
    assert "does not fit" in memory_used(full, full.peak_memory - 1)
