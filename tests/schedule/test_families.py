"""Test the fields of a family's record, with a family that keeps its order and one that has few methods."""

import re
from dataclasses import replace
from math import ceil, floor, gcd

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning.bounds import bound
from megatron_vp.cost.planning.candidates import Candidate, candidates
from megatron_vp.cost.planning.evaluation import evaluate
from megatron_vp.schedule import (
    FAMILIES,
    Family,
    PassCosts,
    Placement,
    VocabMethod,
    generate,
    simulate,
    validate,
)
from megatron_vp.schedule.blocks import BuildingBlock
from tests.schedule.schedule_checks import assert_follows_the_table, memory_bound

MODEL = ModelShape(layers=8, hidden=512, heads=8, ffn=2048, vocab=8192)
JOB = Job(MODEL, sequence=1024, micro_batch=1, microbatches=10, pipeline=4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formula_of_a_peak_is_what_the_record_promises(name):
    record = FAMILIES[name]
    products = re.sub(r"(?<=[\d)])\s*(?=[(pvrm])", " * ", record.peak_formula)
    for p in range(1, 20):
        for v in [record.chunks] if record.chunks else (2, 3, 5):
            for r in range(p):
                formula = eval(products, {"ceil": ceil, "floor": floor, "gcd": gcd, "p": p, "v": v, "r": r})
                assert record.peak(p, r, v, 10) / v == formula, (p, r, v)


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
        placement=Placement.linear(p),
        interval=interval,
        forward_time=costs.F,
        backward_time=backward,
        forward=tuple(stage * costs.F for stage in range(p)),
        backward=tuple(AFTER_ALL * interval + (p - 1 - stage) * backward for stage in range(p)),
        weight=None,
    )


GPIPE = Family(
    "gpipe",
    "all forwards, then all backwards",
    Placement.round_robin,
    lambda p, r, v, m: m,
    "m",
    block=gpipe,
    keeps_order=True,
)


@pytest.fixture
def with_gpipe(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpipe", GPIPE)


@pytest.mark.usefixtures("with_gpipe")
@pytest.mark.parametrize("method", ["none", "vocab-1", "vocab-2"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 7), (4, 12)])
def test_a_family_that_keeps_its_order_runs_all_forwards_first(p, m, method):
    costs = PassCosts(F=1, B=2, W=0.5, S=0.4, T=0.3, comm=0.1)
    schedule = generate("gpipe", p, m, vocab=method, costs=costs)
    timeline = validate(schedule, costs, memory_bound(schedule))
    assert_follows_the_table(timeline)
    assert timeline.peak_activation == (m,) * p
    for order in schedule.ranks:
        kinds = [step.kind.value for step in order if step.kind.value in "FB"]
        assert kinds == ["F"] * m + ["B"] * m


@pytest.mark.usefixtures("with_gpipe")
def test_the_policy_is_what_keeps_the_order(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpipe", replace(GPIPE, keeps_order=False))
    assert min(simulate(generate("gpipe", 4, 12, vocab="vocab-2")).peak_activation) < 12


@pytest.mark.usefixtures("with_gpipe")
@pytest.mark.parametrize("method", ["none", "vocab-1", "vocab-2"])
def test_a_plan_counts_every_microbatch_that_a_kept_order_holds(method):
    vocab = VocabMethod(method)

    def activations(name):
        found = evaluate(Candidate(method, Plan(name, vocab)), JOB, HARDWARE["h100"])
        return [rank.activations for rank in found.memory]

    # Ranks 1 and 2 have equal layers; under 1F1B rank 2 holds a microbatch less than rank 1.
    some, all_of_them = activations("1f1b"), activations("gpipe")
    held = 3 + (vocab.barriers if vocab.is_sharded else 0)
    assert all_of_them[1] - some[1] == pytest.approx((JOB.microbatches - held) * (some[1] - some[2]))


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
