"""Test that `megatron-vp check` and `sbatch` refuse the same arguments as the start of a job."""

import shlex
from dataclasses import replace

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore.options import host_room
from megatron_vp.mcore.start.preflight import check_job
from tests.harness.training import tiny_model
from tests.mcore.case_parts import ALL_TO_ALL, PAIRS


def check(flags, **settings):
    check_job(
        ["--cpu", *tiny_model(pipeline_model_parallel_size=2, **settings), *shlex.split(flags)],
        2,
        rehearse=lambda job: (),
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--vocab-shards even", "has no effect without --vocab-parallel: add --vocab-parallel, or leave"),
        ("--vocab-parallel --vocab-shards 64", "gives rows for 1 pipeline rank, but the pipeline has 2"),
        ("--vocab-parallel --vocab-shards 32,24", "adds up to 56 rows, but the padded vocabulary has 64: add 8"),
        (
            "--vocab-parallel --pipeline-schedule interlaced --vocab-shards 64,0",
            "--vocab-shards 64,0 with --pipeline-schedule interlaced is not supported: all ranks compute the",
        ),
        ("--dataloader-type external", "pretrain_gpt_vp.py with --dataloader-type external is not supported"),
        ("--activation-limit 3", "--activation-limit 3 with --pipeline-schedule 1f1b has no effect"),
        (
            "--pipeline-schedule v-flex --vocab-parallel --activation-limit 0.5",
            "--activation-limit 0.5 is too small for a v-flex schedule of 2 ranks, ",
        ),
        (
            "--offload-chunks 2",
            "--offload-chunks 2 exceeds the number of chunks per rank of --pipeline-schedule",
        ),
        (
            "--pipeline-schedule zb-v --offload-chunks all --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "--offload-chunks all with --recompute-granularity full is not supported: recomputed layers keep only",
        ),
        (
            "--vocab-parallel --pipeline-schedule v-half --overlap-moe-expert-parallel-comm",
            "this schedule runs no forward and backward as one; use dualpipe-v, or interleaved with",
        ),
        (
            "--pipeline-schedule dualpipe-v --overlap-moe-expert-parallel-comm --dataloader-inter-document-masking",
            "--overlap-moe-expert-parallel-comm and --dataloader-inter-document-masking is not supported: here,",
        ),
        (
            "--pipeline-schedule dualpipe-v --overlap-moe-expert-parallel-comm --offload-chunks 1",
            "--offload-chunks 1 with --overlap-moe-expert-parallel-comm is not supported: activations are moved",
        ),
        ("--tp 2", "unrecognized arguments: --tp 2; the nearest known option is --tensor-model-parallel-size"),
    ],
)
def test_what_training_refuses_is_refused(tmp_path, flags, said):
    with pytest.raises(UserError) as refused:
        check(flags.format(folder=tmp_path / "trace"), vocab_size=63)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_plain_megatron_is_said_to_lose_the_final_norm_behind_a_dense_layer():
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "bf16": True}
    words = ["--cpu", *tiny_model(**stages, **ALL_TO_ALL, **PAIRS), "--moe-layer-freq"]
    for dense, frequency in ((False, "1"), (True, "2"), (True, "([1]*3+[0])")):
        said = check_job([*words, frequency], 4, rehearse=lambda job: ()).warnings
        assert any("leaves out the final norm" in each for each in said) == dense


def test_activations_that_leave_the_device_need_room_on_the_host(monkeypatch):
    flags = ["--pipeline-schedule", "zb-v", "--offload-chunks", "all"]
    words = ["--cpu", *tiny_model(pipeline_model_parallel_size=2, seq_length=8192, max_position_embeddings=8192)]
    job = check_job([*words, *flags], 2)
    assert job.settings.replaces_schedule and job.settings.offload_chunks(2) == 2
    assert job.order.other["copy"] > 0, "passes are ordered with the copies in mind"
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1024}
    monkeypatch.setattr(host_room.os, "sysconf", pages.__getitem__)
    with pytest.raises(UserError, match=r"needs 8 GiB of host memory per node, .*offload fewer chunks, or leave"):
        check_job([*words, *flags], 2)
    assert check_job(words, 2).settings.offload_chunks(1) == 0


def test_the_number_of_chunks_may_be_left_to_the_cost_model(monkeypatch):
    words = ["--cpu", *tiny_model(pipeline_model_parallel_size=2), "--pipeline-schedule", "zb-v"]
    job = check_job([*words, "--offload-chunks", "auto"], 2)
    assert (job.args.offload_chunks, job.settings.offload_chunks(2)) == ("0", 0), "it fits as it is"
    monkeypatch.setattr(host_room, "with_chosen_offload", lambda config, plan, *_: replace(plan, offload_chunks=2))
    job = check_job([*words, "--offload-chunks", "auto"], 2)
    assert (job.args.offload_chunks, job.settings.offload_chunks(2)) == ("2", 2)
    assert job.order.other["copy"] > 0


@pytest.mark.parametrize("limit", ["3", "1GiB"])
def test_a_limit_gives_the_schedule_a_shape(limit):
    flags = f"--pipeline-schedule v-flex --vocab-parallel --activation-limit {limit}"
    job = check_job(["--cpu", *tiny_model(pipeline_model_parallel_size=2), *shlex.split(flags)], 2)
    assert job.settings.family.shape == job.args.schedule_shape != ""
    assert job.settings.family.name == "v-flex"
