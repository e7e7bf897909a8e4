"""Test the fields of a family's record, with a new family and one that has few methods."""

from dataclasses import replace
from math import gcd

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning.bounds import bound
from megatron_vp.cost.planning.candidates import Candidate, candidates
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.schedule import (
    FAMILIES,
    Family,
    Placement,
    VocabMethod,
)
from megatron_vp.schedule.blocks import BuildingBlock

MODEL = ModelShape(layers=8, hidden=512, heads=8, ffn=2048, vocab=8192)
JOB = Job(MODEL, sequence=1024, micro_batch=1, microbatches=10, pipeline=4)


MOST_CHUNKS = {
    "1f1b": lambda p, r, v: p - r,
    "interleaved": lambda p, r, v: 2 * (p - 1 - r) + (v - 1) * p + 1,
    "zb-h1": lambda p, r, v: p,
    "zb-v": lambda p, r, v: 2 * p,
    "v-half": lambda p, r, v: 2 * (p // 2 + 1),
    "v-min": lambda p, r, v: 2 * ((p + 4) // 3),
    "interlaced": lambda p, r, v: 3 * p // 2 - r,
    "dualpipe-v": lambda p, r, v: 2 * p + 1,
    "gis": lambda p, r, v: p * v - r,
    "gis-h": lambda p, r, v: (p + 1) // 2 * (v - 1) + p - r,
    "po": lambda p, r, v: (p + 1) // 2 * (v - 1) + p - r + gcd(v, (p + 1) // 2) - 1,
    "v-flex": lambda p, r, v: 2 * p,
}
"""The largest number of chunk activations of each family."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formula_of_a_peak_is_a_whole_number_of_chunks(name):
    record = FAMILIES[name]
    for p in range(1, 20):
        for v in [record.chunks] if record.chunks else (2, 3, 5):
            for r in range(p):
                found = record.promised_peak(p, r, v, 10**6, record.methods[0])
                assert found == MOST_CHUNKS[name](p, r, v), (p, r, v)


def test_a_promise_counts_barriers_and_no_more_microbatches_than_there_are():
    interleaved, interlaced = FAMILIES["interleaved"], FAMILIES["interlaced"]
    assert interleaved.promised_peak(4, 0, 3, 100, VocabMethod.NONE) == 15
    assert interleaved.promised_peak(4, 0, 3, 100, VocabMethod.VOCAB_1) == 21
    assert interleaved.promised_peak(4, 0, 3, 4, VocabMethod.VOCAB_1) == 12
    assert interlaced.promised_peak(4, 1, 1, 100, VocabMethod.INTERLACED) == 5


AFTER_ALL = 1e6
"""Intervals between the forwards and the backwards of a GPipe: more than there are microbatches."""


def gpipe(pipeline_size, chunks, costs):
    p, backward = pipeline_size, costs.B + costs.W
    interval = costs.F + backward
    return BuildingBlock(
        placement=Placement.round_robin(p),
        interval=interval,
        forward_time=costs.F,
        backward_time=backward,
        forward=tuple(stage * costs.F for stage in range(p)),
        backward=tuple(AFTER_ALL * interval + (p - 1 - stage) * backward for stage in range(p)),
        weight=None,
    )


GPIPE = Family("gpipe", "all forwards, then all backwards", "2p", block=gpipe)


@pytest.fixture
def with_gpipe(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpipe", GPIPE)


@pytest.mark.usefixtures("with_gpipe")
def test_bounds_hold_for_a_new_record():
    candidate = Candidate("vocab-2", Plan("gpipe", VocabMethod.VOCAB_2))
    simulated = evaluate(candidate, JOB, HARDWARE["h100"])
    least = bound(candidate.plan, JOB, HARDWARE["h100"])
    assert 0.5 * simulated.iteration_seconds < least.seconds <= simulated.iteration_seconds
    assert 0.5 * simulated.peak_memory < least.memory_within(simulated.iteration_seconds) <= simulated.peak_memory


def test_a_plan_has_the_methods_of_the_record_only(monkeypatch):
    few = (VocabMethod.VOCAB_1,)
    monkeypatch.setitem(FAMILIES, "gpipe", replace(GPIPE, methods=few))
    assert [each.method for each in candidates(JOB, HARDWARE["h100"]) if each.plan.schedule == "gpipe"] == ["vocab-1"]
    few = (VocabMethod.NONE, VocabMethod.VOCAB_2)
    monkeypatch.setitem(FAMILIES, "gpipe", replace(GPIPE, methods=few))
    found = {each.method for each in candidates(JOB, HARDWARE["h100"]) if each.plan.schedule == "gpipe"}
    assert found - {"redistributed"} == {"plain", "vocab-2"}
