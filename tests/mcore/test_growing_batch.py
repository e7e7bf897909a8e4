"""Test that every command takes the batch size of `--step-batch-size-schedule` where Megatron derives another one."""

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import TWO_BATCHES, last_batch, read_sizes
from megatron_vp.mcore.start.banner import describe_sizes
from megatron_vp.mcore.start.preflight import check_job
from tests.harness.training import tiny_model

GROWING = {"step_batch_size_schedule": "0:4 1K:8 0.002M:12", "global_batch_size": None}
PIPELINE = {"pipeline_model_parallel_size": 2, "vocab_parallel": True, "micro_batch_size": 1}


@pytest.mark.parametrize("text", [*("0:4", "0:768 250B:1536,500b:3K", "2T:6 0:4 1.5K:5", " 0:1,  3:2 ")])
def test_the_last_batch_is_that_of_megatrons_own_reader(text):
    assert last_batch(text) == StepBatchsizeNumMicroBatchesCalculator._parse_schedule(text, None)[-1][1]


@pytest.mark.parametrize("text", ["", "4", "0:x", "0:1:2", "0:4Q"])
def test_another_text_is_refused_in_a_line(text):
    with pytest.raises(UserError, match=r"cannot be parsed: give THRESHOLD:BATCH pairs, as in '0:256 1B:512'"):
        last_batch(text)


def test_check_and_banner_count_and_predict_the_microbatches_of_the_last_batch():
    grown, fixed = (
        check_job(["--cpu", *tiny_model(**PIPELINE, **batch)], 4) for batch in (GROWING, {"global_batch_size": 12})
    )
    assert "; 6 microbatches at the end of --step-batch-size-schedule; 1f1b" in describe_sizes(grown, 4)
    assert "; 6 microbatches; 1f1b" in describe_sizes(fixed, 4)
    assert [said for said in grown.warnings if "--train-samples" in said] and not fixed.warnings


def test_plan_and_simulate_count_the_microbatches_of_the_last_batch():
    grown, fixed = (
        job_of(read_sizes([], tiny_model(**PIPELINE, **batch)), 4) for batch in (GROWING, {"global_batch_size": 12})
    )
    assert grown == fixed and grown.microbatches == 6


def test_two_batch_sizes_are_refused_with_what_a_shipped_configuration_needs():
    both = tiny_model(**PIPELINE, **GROWING | {"global_batch_size": 4})
    with pytest.raises(UserError, match="exclude each other") as refused:
        check_job(["--cpu", *both], 4)
    assert str(refused.value) == TWO_BATCHES and "`global_batch_size: null`" in TWO_BATCHES
    with pytest.raises(UserError, match="exclude each other"):
        job_of(read_sizes([], both), 4)
