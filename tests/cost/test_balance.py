"""Test the joint choice of rows and layers: water filling against brute force, and limits that the choice respects."""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning.balanced import (
    EVEN_BAND,
    _Search,
    balanced,
    best_shards,
    unit_of_rows,
)
from megatron_vp.cost.planning.candidates import balanced_layers
from megatron_vp.cost.planning.layer_division import divided, fill, layer_seconds
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.schedule import Placement, VocabMethod

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from least_passes import least_passes

H100 = find_hardware("h100")
ALIKE = H100.alike
TWO = VocabMethod.VOCAB_2
MODEL = ModelShape(layers=7, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=16, pipeline=4)


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(st.floats(0, 4), min_size=2, max_size=3),
    steps=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    data=st.data(),
)
def test_no_other_way_to_pour_has_a_lower_peak(work, steps, data):
    cost = [0.0]
    for step in steps:
        cost.append(cost[-1] + step)
    total = len(steps)
    most = data.draw(st.lists(st.integers(0, total), min_size=len(work), max_size=len(work)))
    found = fill(work, cost, most)
    ways = [way for way in product(*(range(cap + 1) for cap in most)) if sum(way) == total]

    def peak(way):
        return max(own + cost[units] for own, units in zip(work, way, strict=True))

    if not ways:
        assert found is None
        return
    assert sum(found) == total and all(units <= cap for units, cap in zip(found, most, strict=True))
    assert peak(found) == pytest.approx(min(map(peak, ways)), rel=1e-9, abs=1e-9)


@settings(max_examples=6, deadline=None)
@given(
    ranks=st.integers(2, 6),
    layers=st.integers(6, 24),
    hidden=st.sampled_from([1024, 2048, 4096]),
    units=st.integers(128, 2048),  # 16,384 words: with fewer, the fixed time of S and T on every holder shows
    rounds=st.integers(2, 6),
)
def test_no_layout_of_whole_layers_is_faster_for_any_model(ranks, layers, hidden, units, rounds):
    model = ModelShape(layers=layers, hidden=hidden, heads=16, ffn=4 * hidden, vocab=128 * units)
    job = Job(model, sequence=2048, micro_batch=1, microbatches=rounds * ranks, pipeline=ranks)
    placement = Placement.round_robin(ranks)
    whole = min(
        predict(job, Plan(layers=each), ALIKE).iteration_seconds
        for each in {balanced_layers(job, placement, ALIKE), divided(layer_seconds(PassTimes(job, ALIKE)), placement)}
    )
    runs = []
    for method in (VocabMethod.VOCAB_1, VocabMethod.VOCAB_2):
        plan = Plan(vocab=method)
        found = predict(job, balanced(job, plan, H100)[0], ALIKE)
        runs.append((found.iteration_seconds, found.timeline.makespan / least_passes(job, method, ALIKE)))
    seconds, over_bound = min(runs)
    assert seconds <= whole and over_bound <= 1.02


def test_rows_go_where_there_are_fewer_layers():
    found, gain = balanced(JOB, Plan(vocab=TWO), H100)
    assert sum(found.layers) == 7 and sum(found.vocab_rows) == 131072 and gain > 1.05
    assert all(rows % 128 == 0 for rows in found.vocab_rows)
    few, many = ([r for n, r in zip(found.layers, found.vocab_rows, strict=True) if n == layers] for layers in (1, 2))
    assert min(few) > 2 * max(many) and max(many) - min(many) <= 128
    assert balanced(JOB, Plan(vocab=TWO), H100)[0] == found


def test_a_layout_of_the_user_stays():
    given_layers = (1, 2, 3, 1)
    found, _ = balanced(JOB, Plan(vocab=TWO, layers=given_layers), H100, layout_given=True)
    assert found.layers == given_layers and found.vocab_rows[2] == 0 and found.vocab_rows[3] > found.vocab_rows[1]
    with pytest.raises(UserError, match="does not match 7 layers"):
        balanced(JOB, Plan(vocab=TWO, layers=(1, 2, 3, 2)), H100, layout_given=True)
    assert balanced(JOB, Plan(vocab=TWO, layers=given_layers), H100) == balanced(JOB, Plan(vocab=TWO), H100)


LARGE = replace(MODEL, hidden=4096, heads=32, ffn=16384)


@pytest.mark.parametrize(
    ("layers", "vocab", "kept"),
    [((3, 4, 4, 3), 8192, True), ((4, 4, 4, 2), 98304, False), ((3, 4, 4, 2), 131072, False)],
)
def test_in_a_given_layout_the_flag_never_loses(layers, vocab, kept):
    model = replace(LARGE, layers=sum(layers), vocab=vocab)
    job = Job(model, sequence=4096, micro_batch=1, microbatches=256, pipeline=4, data=32)
    plan, whole = Plan(vocab=TWO, layers=layers), predict(job, Plan(layers=layers), H100)
    found, even = best_shards(job, plan, H100, 79e9, True)[0], predict(job, plan, H100)
    assert (found.layers, found.vocab is TWO) == (layers, not kept)
    assert predict(job, found, H100).iteration_seconds <= whole.iteration_seconds
    assert kept or (found.vocab_rows[3] == max(found.vocab_rows) and not found.vocab_rows[1])
    assert (even.iteration_seconds > whole.iteration_seconds) == (vocab < 131072)
    if kept:
        assert best_shards(job, plan, find_hardware("cpu"), 79e9, True)[0].vocab is TWO


def test_heads_that_predict_further_stay_with_ranks_that_hold_rows():
    model = replace(LARGE, layers=15, vocab=32768, mtp_heads=("*",), behind_mtp=1)
    job = Job(model, sequence=4096, micro_batch=1, microbatches=16, pipeline=4)
    found, _ = best_shards(job, Plan(vocab=TWO, layers=(5, 5, 4, 1)), H100, 79e9, True)
    assert found.vocab is VocabMethod.NONE or found.vocab_rows is None or found.vocab_rows[2]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("layers", [7, 8, 12])
@pytest.mark.parametrize("limit", [None, 22e9])
def test_what_cannot_be_chosen_is_not_simulated(monkeypatch, schedule, layers, limit):
    job, plan = replace(JOB, model=replace(MODEL, layers=layers), microbatches=64), Plan(schedule, vocab=TWO)
    outcome, tried, least = _Search.predict, [], []

    def noted(search, each):
        found = outcome(search, each)
        tried.append(found)
        least.append((search.least_of_all(), search.least(each), found.iteration_seconds))
        return found

    monkeypatch.setattr(_Search, "predict", noted)
    found, simulated = balanced(job, plan, H100, memory_limit=limit), len(tried)
    assert all(of_all <= of_this <= seconds for of_all, of_this, seconds in least)
    for bound in ("least", "least_of_all"):
        monkeypatch.setattr(_Search, bound, lambda *_: 0.0)
    assert balanced(job, plan, H100, memory_limit=limit) == found
    assert simulated <= len(tried) - simulated


def test_even_shards_stay_where_they_are_good_enough(monkeypatch):
    few = [_Search.predict]
    monkeypatch.setattr(_Search, "predict", lambda *each: few.append(each) or few[0](*each))
    long = replace(JOB, model=replace(MODEL, layers=8), microbatches=512)
    assert balanced(long, Plan(vocab=TWO), H100)[0].vocab_rows is None and len(few) == 2, "only even shards"
    job = replace(JOB, model=replace(MODEL, layers=8))
    assert balanced(job, Plan(vocab=TWO), H100) == (Plan(vocab=TWO), 1.0)
    spread, _ = balanced(JOB, Plan(vocab=TWO), H100)
    even = predict(JOB, Plan(vocab=TWO, layers=(1, 2, 2, 2)), H100).iteration_seconds
    assigned = predict(JOB, spread, H100).iteration_seconds
    assert assigned < even / (1 + EVEN_BAND)


def test_rows_leave_ranks_that_are_full():
    job = replace(JOB, model=replace(MODEL, layers=8), micro_batch=8)
    even = predict(job, Plan(vocab=TWO), H100)
    totals = [rank.total for rank in even.memory]
    assert totals[0] == max(totals) > 1.05 * totals[3]
    limit = 0.97 * totals[0]
    found, _ = balanced(job, Plan(vocab=TWO), H100, memory_limit=limit)
    assert found.vocab_rows[0] < 32768 < found.vocab_rows[3]
    assigned = predict(job, found, H100)
    assert max(rank.total for rank in assigned.memory) <= limit
    # Where nothing fits, the limit is left aside.
    assert balanced(job, Plan(vocab=TWO), H100, memory_limit=1e9)[0].vocab_rows is None


def test_what_is_left_of_the_vocabulary_goes_to_the_last_holder():
    job = replace(JOB, model=replace(MODEL, vocab=131072 + 50))
    found, _ = balanced(job, Plan(vocab=TWO), H100)
    last = max(rank for rank, rows in enumerate(found.vocab_rows) if rows)
    assert [rows % 128 for rows in found.vocab_rows] == [50 * (rank == last) for rank in range(4)]
    odd = replace(job, tensor=4)
    assert unit_of_rows(odd.model.vocab, 4, 4) is None and balanced(odd, Plan(vocab=TWO), H100)[0].vocab_rows is None
