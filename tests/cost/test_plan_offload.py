"""Test plans with offloaded activations: which numbers of chunks are tried, and the time that less memory costs."""

import json
from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import GIB, HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning import offloading, search
from megatron_vp.cost.planning.offloading import (
    copy_load,
    fits_host,
    offloaded,
    with_chosen_offload,
)
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.cost.planning.variants import variants
from megatron_vp.errors import UserError
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import VocabMethod
from tests.cost.small_job import run

H200 = HARDWARE["h200"]
MODEL = ModelShape(layers=16, hidden=8192, heads=64, ffn=32768, vocab=64000)
JOB = Job(MODEL, sequence=4096, micro_batch=1, microbatches=16, pipeline=4, layers=LayerKind.ENGINE)
PLAN = Plan("po", VocabMethod.VOCAB_2, 4)
WIDE = replace(H200, host=replace(H200.host, out=2e11, back=2e11))
"""Copies so fast that all chunks can leave."""


def base_of(plan=PLAN, hardware=WIDE):
    return evaluate(plan, JOB, hardware)


def evaluations(base, hardware):
    """Runs of `base` with all numbers of offloaded chunks that are tried."""
    found = [evaluate(each, JOB, hardware) for each in offloaded(base.plan, JOB, hardware)]
    return list(filter(fits_host, found))


def counts(found):
    return [each.plan.offload_chunks for each in found]


def test_every_number_of_chunks_is_tried():
    base = base_of()
    found = evaluations(base, WIDE)
    assert counts(found) == [1, 2, 3, 4]
    peaks = [each.peak_memory for each in (base, *found)]
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == len(peaks)


def test_copies_that_would_set_the_pace_are_not_tried():
    base = base_of(hardware=H200)
    loads = [copy_load(JOB, PLAN, chunks, H200) for chunks in (1, 2, 3, 4)]
    assert loads[1] < offloading.MOST_LOAD < loads[3]
    allowed = {chunks for chunks, load in zip((1, 2, 3, 4), loads, strict=True) if load <= offloading.MOST_LOAD}
    assert set() < {*counts(evaluations(base, H200))} <= allowed
    slow = replace(H200, host=replace(H200.host, out=1e9, back=1e9))
    assert evaluations(base, slow) == []


def test_plan_says_what_less_memory_costs(small, search_once):
    words = [small, "--hidden-size", 8192, "--num-attention-heads", 64, "--hardware", "h200", "--memory", 400]
    words += ["--num-virtual-stages-per-pipeline-rank", 2]
    found = json.loads(run("plan", *words, "--offload", "--format", "json").stdout)
    plans, best = found["plans"], [found["plans"][index] for index in found["frontier"]]
    names = {each["schedule"] for each in plans if each["offload_chunks"]}
    assert {"po", "gis-h"} <= names and "gis" in {each["schedule"] for each in plans}
    assert [each["peak_memory_bytes"] for each in best] == sorted(
        (each["peak_memory_bytes"] for each in best), reverse=True
    )
    assert best[0]["iteration_seconds"] == min(each["iteration_seconds"] for each in plans)
    assert any(each["offload_chunks"] and "--offload-chunks" in each["flags"] for each in best)
    for each in plans:
        assert (
            not any(
                other["iteration_seconds"] < each["iteration_seconds"]
                and other["peak_memory_bytes"] < each["peak_memory_bytes"]
                for other in plans
            )
            or each not in best
        )
    text = run("plan", *words, "--offload").stdout
    assert "offloaded" in text and "host" in text


def test_recomputed_chunks_are_not_offloaded(small):
    words = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    refused = run("plan", small, "--offload", *words).exception
    assert isinstance(refused, UserError) and "one of the two" in str(refused)


def test_auto_takes_as_few_chunks_as_fit_and_are_fastest():
    auto, fixed = {"offload_chunks": "auto"}, {"offload_chunks": 0}
    base = base_of()
    assert with_chosen_offload(fixed, PLAN, JOB, WIDE, 0.5 * base.peak_memory) is PLAN
    assert with_chosen_offload(auto, PLAN, JOB, WIDE, base.peak_memory) is PLAN, "it fits as it is"
    all_away = evaluate(replace(PLAN, offload_chunks=4), JOB, WIDE)
    limit = (base.peak_memory + all_away.peak_memory) / 2
    chosen = with_chosen_offload(auto, PLAN, JOB, WIDE, limit)
    fitting = [each for each in evaluations(base, WIDE) if each.fits(limit)]
    assert chosen == min(fitting, key=lambda each: each.iteration_seconds).plan and chosen.offload_chunks
    with pytest.raises(
        UserError, match=r"auto finds no number of chunks with which this job fits into .*: it needs at least "
    ):
        with_chosen_offload(auto, PLAN, JOB, WIDE, 0.5 * all_away.peak_memory)


WIDE_MODEL = {
    "num_layers": 8,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "seq_length": 4096,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "pipeline_model_parallel_size": 4,
}
KEPT = ("tensor", "context", "micro-batch", "recompute")


@pytest.fixture(scope="module")
def plain_and_offloaded():
    tried = variants(WIDE_MODEL, 4, WIDE, KEPT)
    return [search.Search(tried, WIDE, 100 * GIB, offload=offload).run() for offload in (False, True)]


def test_offload_adds_smaller_runs_and_changes_no_other(plain_and_offloaded):
    plain, offloaded = plain_and_offloaded
    kept = [(each.job, each.plan) for each in offloaded.found]
    assert len({*kept}) == len(kept)
    best = offloaded.frontier
    for each in plain.frontier:
        assert any(one.iteration_seconds <= each.iteration_seconds and one.fits(each.peak_memory) for one in best)
    away = [each for each in best if each.plan.offload_chunks]
    assert min(each.peak_memory for each in away) < 0.95 * min(each.peak_memory for each in plain.frontier)
    assert all(rank.load <= 0.91 for each in away for rank in each.copies)
