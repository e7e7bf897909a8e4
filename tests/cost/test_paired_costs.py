"""Test what the cost model says of forwards and backwards that run as one."""

from dataclasses import replace

import pytest

from evidence.comparison import predicted
from evidence.public_rows import read_rows
from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.job_plan import settings_of
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.planning import samples
from megatron_vp.cost.planning.bounds import bound
from megatron_vp.cost.planning.candidates import refusal
from megatron_vp.cost.planning.predict import evaluate, predict
from megatron_vp.cost.ranks.communication import CONTENTION
from megatron_vp.schedule import VocabMethod
from tests.cost.test_expert_layers import DEEPSEEK_V3

H100 = HARDWARE["h100"]
CONFIG = DEEPSEEK_V3 | {
    **{"num_layers": 16, "moe_layer_freq": 1, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 32},
    **{"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "flex", "delay_wgrad_compute": True},
    **{"transformer_impl": "transformer_engine", "global_batch_size": 32 * 12},
}
JOB = job_of(CONFIG, 128)
ALONE = replace(JOB, expert_overlap=False)
PAIRED_PLANS = [
    Plan("interleaved", chunks=2),
    Plan("interleaved", VocabMethod.VOCAB_2, chunks=2),
    Plan("dualpipe-v", VocabMethod.VOCAB_2),
]


@pytest.mark.parametrize("plan", PAIRED_PLANS, ids=lambda plan: plan.name)
def test_a_prediction_takes_what_pairs_save_from_the_pairs_of_the_schedule(plan):
    paired, alone = predict(JOB, plan, H100), predict(ALONE, plan, H100)
    costs, schedule = paired.timeline.costs, paired.timeline.schedule
    saved = [sum(costs.saved(schedule, rank, *pair) for pair in pairs) for rank, pairs in enumerate(schedule.pairs)]
    assert all(saved)
    assert [a - b for a, b in zip(alone.busy, paired.busy, strict=True)] == pytest.approx(saved)
    assert paired.iteration_seconds < alone.iteration_seconds - 0.6 * min(saved)
    assert paired.iteration_seconds >= bound(plan, JOB, H100).seconds
    assert paired.seconds["work"] < alone.seconds["work"]


@pytest.mark.parametrize("plan", PAIRED_PLANS, ids=lambda plan: plan.name)
def test_a_simulation_that_is_cut_short_comes_to_the_same(plan, monkeypatch):
    job = replace(JOB, microbatches=96)
    whole = predict(job, plan, H100)
    monkeypatch.setattr(samples, "SAMPLED", 0)
    short = evaluate(plan, job, H100)
    assert short.timeline.schedule.microbatches < job.microbatches
    assert short.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=2e-3)
    assert short.busy == pytest.approx(whole.busy, rel=2e-3)


@pytest.mark.parametrize(("slower", "most"), [(1, (1 - CONTENTION) / 2), (100, 0.02)])
def test_a_pair_hides_no_more_than_it_computes(slower, most):
    hardware = replace(H100, network_bandwidth=H100.network_bandwidth / slower)
    costs = predict(JOB, PAIRED_PLANS[0], hardware).timeline.costs
    for F, B, W, hidden in zip(costs.F, costs.B, costs.W, costs.hidden, strict=True):
        assert 0 < sum(hidden) < most * (F + B + W)


def test_the_longer_warm_up_holds_one_more_chunk():
    paired, alone = (predict(job, PAIRED_PLANS[0], H100) for job in (JOB, ALONE))
    more = [p - a for p, a in zip(paired.timeline.peak_activation, alone.timeline.peak_activation, strict=True)]
    assert more == [0.5] * 4
    assert paired.peak_memory > alone.peak_memory


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(vocab=VocabMethod.VOCAB_2), Plan("interleaved", chunks=2, offload_chunks=1)]
)
def test_a_schedule_without_pairs_runs_without_the_option(plan):
    assert predict(JOB, plan, H100).iteration_seconds == predict(ALONE, plan, H100).iteration_seconds
    settings = settings_of(CONFIG, plan, JOB)
    assert settings["overlap_moe_expert_parallel_comm"] is None is settings["delay_wgrad_compute"]
    assert "overlap-moe" not in (refusal(CONFIG, plan) or "")


@pytest.mark.parametrize("size", [{"expert_model_parallel_size": 1}, {"recompute_granularity": "full"}], ids=str)
def test_sizes_with_which_megatron_runs_no_pairs_run_without_the_option(size):
    config = CONFIG | size
    job = job_of(config, 128)
    assert not PAIRED_PLANS[0].runs_pairs(job)
    assert settings_of(config, PAIRED_PLANS[0], job)["overlap_moe_expert_parallel_comm"] is None


def test_a_schedule_with_pairs_keeps_the_option():
    assert not any("overlap" in name for plan in PAIRED_PLANS for name in settings_of(CONFIG, plan, JOB))


def test_the_published_gain_of_overlap_is_predicted():
    rows = {row["id"]: row for row in read_rows()}
    overlapped, alone = (predicted(rows[f"moe-zoo-0{number}"]) for number in (98, 99))
    assert 1.09 < overlapped.tokens_per_second / alone.tokens_per_second < 1.15
