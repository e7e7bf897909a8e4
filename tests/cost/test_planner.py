"""Test the planner: layouts against brute force, reasons for lost time, memory limits, simulations that stop early."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_vp.cost.hardware.gpus import GIB, find_hardware
from megatron_vp.cost.layers.job_plan import settings_of
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning import samples
from megatron_vp.cost.planning.candidates import balanced_layers, candidates, placed_heads
from megatron_vp.cost.planning.choice import judge
from megatron_vp.cost.planning.offloading import fitted_evaluation, with_limit
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.cost.planning.search import Search
from megatron_vp.cost.planning.variants import Variant
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.schedule import FAMILIES, Placement, VocabMethod

H100 = find_hardware("h100")
MODEL = ModelShape(layers=12, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=12, pipeline=4)


@pytest.mark.parametrize("place", [Placement.round_robin, Placement.v_shape, lambda p: Placement.round_robin(p, 2)])
@pytest.mark.parametrize("layers", [5, 7])
@pytest.mark.parametrize(("vocab", "tensor"), [(1024, 1), (32768, 1), (131072, 1), (131072, 8)])
def test_no_integer_layout_is_better_than_the_balanced_one(place, layers, vocab, tensor):
    job = replace(JOB, model=replace(MODEL, layers=layers, vocab=vocab), pipeline=3, tensor=tensor)
    placement = place(3)
    times = PassTimes(job, H100)
    layer = sum(times.layer())
    ends = {placement.first_rank: 0.0} | {placement.last_rank: 0.0}
    ends[placement.first_rank] += sum(times.whole_embedding())
    ends[placement.last_rank] += sum(times.whole_output())

    def busiest(by_rank):
        return max(count * layer + ends.get(rank, 0.0) for rank, count in enumerate(by_rank))

    found = balanced_layers(job, placement, H100)
    assert sum(found) == layers
    by_rank = [sum(found[stage] for stage in stages) for stages in placement.stage_of]
    stages = range(placement.stages)
    assert all(found[stage] for stage in stages[1:-1])
    least = [sum(stage in stages[1:-1] for stage in own) for own in placement.stage_of]
    every = [each for each in product(*(range(few, layers + 1) for few in least)) if sum(each) == layers]
    assert busiest(by_rank) == pytest.approx(min(map(busiest, every)))


def test_every_schedule_that_is_planned_is_a_candidate_with_every_method():
    found = {(each.schedule, each.method) for each in candidates(JOB, H100)}
    for name, family in FAMILIES.items():
        if not family.planned:
            assert name not in {schedule for schedule, _ in found}
            continue
        methods = {"interlaced"} if family.own_method else {"plain", "redistributed", "vocab-1", "vocab-2"}
        assert methods == {method for schedule, method in found if schedule == name}, name


def test_redistributed_is_what_has_uneven_layers():
    assert (Plan(layers=(3, 3, 3, 4)).method, Plan(layers=(3, 3, 4, 2)).method) == ("plain", "redistributed")


def test_layouts_that_people_choose_are_tried():
    job = replace(JOB, model=replace(MODEL, layers=14))
    layouts = {each.layers for each in candidates(job, H100) if each.in_megatron}
    assert (3, 4, 4, 3) in layouts and (1, 2, 2, 2, 2, 2, 2, 1) in layouts
    job = replace(job, model=replace(job.model, layers=13, mtp_heads=("t",)))
    last, alone = placed_heads(job)
    assert (3, 4, 4, 2) in {each.layers for each in candidates(last, H100)} and last == job
    plans = candidates(alone, H100)
    assert alone.model.behind_mtp == 1 and {each.layers for each in plans} == {(6, 7, 0, 0), (1, 2, 3, 2, 2, 3, 0, 0)}
    layout = settings_of({"mtp_num_layers": 1}, plans[0], alone)["pipeline_model_parallel_layout"]
    assert layout == "Et*6|t*7|m|L"
    assert len(placed_heads(replace(job, pipeline=2))) == 1, "Megatron keeps the heads off the first rank"


def test_a_large_vocabulary_is_split_and_the_seconds_add_up():
    heard = []
    job = replace(JOB, model=replace(MODEL, layers=13))
    found = Search([Variant(job, {})], H100, H100.memory, progress=lambda *said: heard.append(said)).run()
    evaluations, tried = found.found, len(candidates(job, H100))
    assert not found.impossible and heard[tried - 1] == ("predicting", tried, tried)
    assigned = [each for each in evaluations if each.plan.vocab_rows]
    assert assigned and len(evaluations) == tried + len(assigned)
    times = [each.iteration_seconds for each in evaluations]
    assert times == sorted(times)
    for each in evaluations:
        assert sum(each.seconds.values()) == pytest.approx(each.iteration_seconds)
        assert min(each.seconds.values()) >= 0
        assert each.bubble_fraction == pytest.approx(1 - each.seconds["work"] / (each.iteration_seconds - each.step))
        assert len(each.busy) == len(each.memory) == 4
    fastest = {each.plan.method: each for each in reversed(evaluations)}
    assert fastest["vocab-2"].iteration_seconds < fastest["redistributed"].iteration_seconds
    assert fastest["redistributed"].iteration_seconds < fastest["plain"].iteration_seconds
    plain = next(each for each in evaluations if each.plan.name == "1f1b, plain")
    assert plain.bound_by(H100.memory) in ("rank 0", "rank 3")
    assert plain.bound_by(plain.peak_memory - 1) == "memory"


def test_the_best_is_the_fastest_that_fits():
    evaluations = [evaluate(Plan("1f1b", v), JOB, H100) for v in (VocabMethod.VOCAB_1, VocabMethod.NONE)]
    evaluations.sort(key=lambda each: each.iteration_seconds)
    assert judge(evaluations, H100.memory).best is evaluations[0]
    least = min(each.peak_memory for each in evaluations)
    assert judge(evaluations, least).best.peak_memory == least
    method = min(evaluations, key=lambda each: each.peak_memory).plan.method
    for order in (evaluations, evaluations[::-1]):
        with pytest.raises(
            UserError, match=rf"no plan fits .*: the smallest, 1f1b, {method}, needs {least / GIB:.1f} GiB;"
        ):
            judge(order, least - 1)


UNEVEN = (3, 3, 2, 1, 3, 2, 3, 3)
"""Layers of an interleaved run whose waits in the steady state differ over a round of microbatches."""

CUT_SHORT = [("1f1b", None), ("zb-v", None), ("interleaved", None), ("interleaved", UNEVEN), ("interlaced", None)]


@pytest.mark.parametrize("name, layers", CUT_SHORT)
def test_a_simulation_that_is_cut_short_comes_to_the_same(name, layers, monkeypatch):
    vocab = VocabMethod.INTERLACED if name == "interlaced" else VocabMethod.VOCAB_2
    if layers:
        vocab = VocabMethod.NONE
    job = replace(JOB, model=replace(MODEL, layers=sum(layers or [16])), microbatches=64)
    candidate = Plan(name, vocab, 2 if name == "interleaved" else None, layers)
    whole = evaluate(candidate, job, H100)
    monkeypatch.setattr(samples, "SAMPLED", 0)
    short = evaluate(candidate, job, H100)
    assert short.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=1e-3)
    assert short.busy == pytest.approx(whole.busy)
    assert short.peak_memory == pytest.approx(whole.peak_memory)
    assert (short.mfu, short.tokens_per_second) == pytest.approx((whole.mfu, whole.tokens_per_second), rel=1e-3)


def _made(schedule, method, seconds, memory=0.0):
    """An evaluation of `schedule` with the time and the activations that a test needs."""
    vocab = VocabMethod.NONE if method in ("plain", "redistributed") else VocabMethod(method)
    one = evaluate(Plan("1f1b"), JOB, H100)
    ranks = tuple(replace(rank, activations=memory) for rank in one.memory)
    layers = (4, 4, 3, 1) if method == "redistributed" else None
    return replace(one, plan=Plan(schedule, vocab, layers=layers), iteration_seconds=seconds, memory=ranks)


GB = 1e9


@pytest.mark.parametrize(
    ("runs", "answer", "best", "rival"),
    [
        (
            [("zb-v", "vocab-2", 1.0, 30), ("1f1b", "redistributed", 1.02, 30), ("1f1b", "plain", 2.0, 30)],
            "faster",
            0,
            1,
        ),
        ([("zb-v", "vocab-2", 1.0, 30), ("1f1b", "vocab-2", 1.009, 30), ("1f1b", "plain", 1.1, 30)], "faster", 1, 2),
        ([("zb-v", "vocab-2", 1.0, 30), ("1f1b", "plain", 1.005, 30)], "not worth it", 1, 1),
        (
            [("1f1b", "plain", 1.0, 30), ("v-half", "vocab-2", 1.005, 15), ("v-min", "vocab-2", 1.009, 10)],
            "smaller",
            2,
            0,
        ),
        ([("1f1b", "plain", 1.0, 30), ("v-half", "vocab-2", 1.02, 15)], "not worth it", 0, 0),
        ([("dualpipe-v", "redistributed", 1.0, 30), ("interleaved", "plain", 1.5, 30)], "faster", 0, 1),
        ([("interlaced", "interlaced", 1.0, 30), ("1f1b", "plain", 3.0, 30)], "not worth it", 1, 1),
        ([("zb-v", "vocab-2", 1.0, 30), ("1f1b", "plain", 0.5, 99), ("1f1b", "plain", 1.0, 98)], "smaller", 0, 2),
        ([("zb-v", "vocab-2", 1.0, 30)], "smaller", 0, None),
    ],
)
def test_the_verdict_compares_with_what_megatron_can_do(runs, answer, best, rival):
    made = [_made(*each[:3], each[3] * GB) for each in runs]
    found = judge(made, H100.memory)
    assert (found.answer, found.best) == (answer, made[best])
    assert found.rival is (None if rival is None else made[rival])
    if answer == "not worth it":
        assert found.best is found.rival and found.speedup < 1.01
    elif found.rival:
        assert found.speedup == found.rival.iteration_seconds / found.best.iteration_seconds


def test_memory_between_two_schedules_gets_one_of_its_own():
    job, names = replace(JOB, pipeline=6, model=replace(MODEL, vocab=32768)), ("zb-v", "v-half", "v-min")
    assert {*names} < {base.name for base in FAMILIES["v-flex"].bases}
    most, middle, least = (evaluate(Plan(name, VocabMethod.VOCAB_1), job, H100) for name in names)
    plan = Plan("v-flex", VocabMethod.VOCAB_1)
    limit = (most.peak_memory + middle.peak_memory) / 2
    (found,) = fitted_evaluation(plan, most, limit)
    assert found.fits(limit) and not most.fits(limit)
    assert found.iteration_seconds < middle.iteration_seconds
    text = found.plan.activation_limit
    assert found.document(limit)["activation_limit"] == text == found.plan.label.removeprefix("v-flex ")
    assert settings_of({}, found.plan, job)["activation_limit"] == text
    assert evaluate(with_limit(job, plan, H100, text), job, H100).fits(limit)
    assert fitted_evaluation(plan, most, 0.3 * least.peak_memory) == [], "nothing fits"


def test_a_search_fits_flexible_schedules_only_where_they_may_gain():
    job = replace(JOB, pipeline=6, microbatches=12, model=replace(MODEL, vocab=32768))
    whole = Search([Variant(job, {})], H100, H100.memory).run()
    assert not any(each.plan.shape for each in whole.found)
    most, least = (
        min(each.peak_memory for each in whole.found if each.plan.schedule == name) for name in ("zb-v", "v-min")
    )
    fitted = Search([Variant(job, {})], H100, (most + least) / 2).run()
    assert any(each.plan.shape for each in fitted.fitting)
