"""Test that a run's settings are one value, and what a job without a schedule gets."""

from __future__ import annotations

import dataclasses
import os

import pytest

from megatron_vp.cost.layers.job_plan import plan_of
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_sizes
from megatron_vp.jobs.vocab_shards import STAYS_WHOLE
from megatron_vp.mcore import settled
from megatron_vp.mcore.start.banner import describe_run
from megatron_vp.mcore.start.preflight import check_job
from megatron_vp.schedule import FAMILIES, PassCosts, VocabMethod
from tests.harness.ranks import run_ranks
from tests.harness.training import tiny_model


def test_a_job_is_settled_from_its_words():
    words = ["--cpu", *tiny_model(pipeline_model_parallel_size=2, vocab_parallel=True, pipeline_schedule="v-half")]
    job = check_job(words, 2)
    assert job.settings.family.name == "v-half" and job.settings.digest is None
    assert job.settings.replaces_schedule and job.settings.places_chunks
    assert job.method is VocabMethod.VOCAB_2 and job.placement.stage_of == ((0, 3), (1, 2))
    assert job.given.pipeline_model_parallel_layout is None and job.args.pipeline_model_parallel_layout == "Et|t|t|tL"
    assert isinstance(job.order, PassCosts) and job.shards == settled.ChosenRows()
    assert job.parts["layers"] == "local" and "--transformer-impl" in job.words.platform_flags
    assert "--pipeline-schedule" in job.words.options and job.nodes is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.order = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.arguments.lr = 1.0
    plain = check_job(["--cpu", *tiny_model(pipeline_model_parallel_size=2)], 2)
    assert not plain.settings.replaces_schedule and plain.method is VocabMethod.NONE and plain.order is None


@pytest.mark.parametrize(
    ("asked", "split"),
    [([], False), (["--vocab-shards", "even"], True), (["--vocab-parallel-algorithm", "vocab-2"], True)],
    ids=str,
)
def test_a_flag_that_gains_nothing_leaves_the_job_as_it_is(asked, split):
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "max_position_embeddings": 4096}
    layout = {
        "pipeline_model_parallel_size": 4,
        "pipeline_model_parallel_layout": "Et*3|t*4|t*4|t*3L",
        "num_layers": 14,
    }
    words = tiny_model(**sizes, **layout, vocab_size=8000, micro_batch_size=1, global_batch_size=8192, bf16=True)
    plain, job = (check_job([*words, *more], 128, nodes="te=no,apex=no") for more in ([], ["--vocab-parallel", *asked]))
    changed = {name for name, value in vars(plain.arguments).items() if value != getattr(job.arguments, name)}
    assert (job.settings == plain.settings, job.shards.whole) == (not split, not split) and bool(changed) == split
    kept = [line for line in describe_run(job, 128) if line == STAYS_WHOLE]
    assert bool(kept) == (not split)


FLEXIBLE = ["--pipeline-schedule", "v-flex", "--activation-limit", "3"]


def shape_found(rank, world_size, words):
    """The shape that a rank's job takes, on ranks that remember other things and hash texts otherwise."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    for other in range(rank):
        check_job([*words, "--activation-limit", f"{4 + other}"], world_size)
    return check_job(words, world_size).args.schedule_shape


def test_all_ranks_find_the_same_shape():
    words = ["--cpu", *tiny_model(pipeline_model_parallel_size=2, vocab_parallel=True), *FLEXIBLE]
    shapes = run_ranks(2, shape_found, words)
    assert shapes[0] and len(set(shapes)) == 1


ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
ROPE = {"num_layers": None, "position_embedding_type": "rope"}
TWO_CHUNKS = (
    {"num_virtual_stages_per_pipeline_rank": 2},
    {"num_layers_per_virtual_pipeline_stage": 1},
    {"num_layers_per_virtual_pipeline_stage": 2, "num_layers": 6, **ENDS},
    {"pipeline_model_parallel_layout": "Ett|t|t|L"},
    {"hybrid_layer_pattern": "*|-|*|-", **ROPE},
)
ONE_CHUNK = (
    {},
    {"num_virtual_stages_per_pipeline_rank": 1},
    {"num_layers_per_virtual_pipeline_stage": 2},
    {"pipeline_model_parallel_layout": "Ettt|tL"},
    {"hybrid_layer_pattern": "*-|*-", **ROPE},
    {"hybrid_layer_pattern": "*-*-", **ROPE},
)


@pytest.mark.parametrize(
    ("stages", "chunks", "asks"),
    [
        *((each, 2, {"vocab_parallel": True}) for each in TWO_CHUNKS),
        (TWO_CHUNKS[0], 2, {"offload_chunks": "all"}),
        *((each, 1, {"vocab_parallel": True}) for each in ONE_CHUNK),
    ],
    ids=str,
)
def test_a_job_without_a_schedule_gets_the_one_that_its_stages_need(stages, chunks, asks):
    words = tiny_model(pipeline_model_parallel_size=2, **stages, **asks)
    job, plan = check_job(["--cpu", *words], 2), plan_of(read_sizes([], words))
    assert job.args.pipeline_schedule == plan.schedule == ("interleaved" if chunks == 2 else "1f1b")
    assert job.settings.replaces_schedule and job.placement.chunks == (plan.chunks or 1) == chunks
    assert plan.offload_chunks == (chunks if "offload_chunks" in asks else 0)


@pytest.mark.parametrize("asks", [{"vocab_parallel": True}, {"offload_chunks": "all"}], ids=str)
def test_a_schedule_that_was_named_is_kept(asks):
    words = tiny_model(pipeline_model_parallel_size=2, **TWO_CHUNKS[0], **asks, pipeline_schedule="1f1b")
    with pytest.raises(UserError, match="--pipeline-schedule 1f1b needs 1: "):
        check_job(["--cpu", *words], 2)
    with pytest.raises(UserError, match="schedule 1f1b has 1 chunk per rank, got 2"):
        plan = plan_of(read_sizes([], words))
        FAMILIES[plan.schedule].placement_of(2, plan.chunks)
