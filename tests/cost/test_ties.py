"""Test how much runs may differ and still count as tied, and how much memory a recommended run leaves free."""

from dataclasses import replace

import pytest

from megatron_vp.cli.planning import memory_room, read_request
from megatron_vp.cost.hardware.constants import ERROR_BAND, compared
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.planning.candidates import Candidate
from megatron_vp.cost.planning.choice import choose
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.schedule import VocabMethod
from tests.cost.small_job import CONFIGS

EXPERTS = ["--num-experts", "8", "--moe-router-topk", "2"]


def asked(hardware="h100", *flags):
    return read_request([CONFIGS / "llama3_8b.yaml"], flags, hardware, None, None)


@pytest.mark.parametrize(
    ("hardware", "flags", "kind", "said"),
    [
        ("a100", [], None, "the largest prediction error on setups like the paper's"),
        ("a100", ["--tensor-model-parallel-size", "2"], ("a100", False, False), "runs of this kind: A100, dense, fp16"),
        ("h100", ["--fp8-format", "hybrid"], ("h100", True, False), "published runs of this kind: H100, dense, fp8"),
        ("h100", EXPERTS, ("h100", False, True), "published runs of this kind: H100, MoE"),
        ("b200", EXPERTS, ("h100", False, True), "this job's kind was compared with a prediction"),
    ],
)
def test_a_tie_is_as_wide_as_the_error_of_the_kind(hardware, flags, kind, said):
    tie = asked(hardware, *flags).tie
    assert said in tie.text
    assert tie.share == (ERROR_BAND["time"] if kind is None else compared(*kind).mean / 100)


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


def test_what_a_run_leaves_free_is_said_and_what_would_give_room(runs):
    request, (split, plain) = runs
    full, roomy = with_peak(plain, 60, 1.0), with_peak(split, 40, 1.1)
    tight = replace(request, limit=full.peak_memory + 2**30)
    line, ways = memory_room(tight, full, [full, roomy])
    assert "1.0 GiB free; predicted memory may be 3 % too low" in line
    for way in ("a run in the table above", "--recompute-granularity full", "more nodes", "plan --search"):
        assert way in ways
    recomputed = asked("h100", "--recompute-granularity", "full")
    ways = memory_room(replace(recomputed, limit=tight.limit), full, searched=True)[1]
    assert (
        "recompute" not in ways and "--search" not in ways and "a run in the table above that needs less memory" in ways
    )
    [line] = memory_room(request, roomy)
    assert "GiB free" in line and "too low" not in line
    assert memory_room(replace(request, limit=full.peak_memory - 1), full) == []
