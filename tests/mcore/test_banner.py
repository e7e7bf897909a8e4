"""Test the lines that a run prints at its start: once per job, and the same as from `megatron-vp check`."""

import contextlib
import io
import sys

import pytest
import torch

from megatron_vp import __version__
from megatron_vp.mcore.start.banner import describe_run, print_banner
from megatron_vp.mcore.start.preflight import check_job
from tests.harness.ranks import run_ranks
from tests.harness.training import tiny_model

TWO_STAGES = {"pipeline_model_parallel_size": 2, "train_iters": 1}


def output_of_training(_rank, _world_size, arguments):
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        script.prepare()
        script.main()
    return output.getvalue()


def test_a_run_says_once_what_it_is_before_it_trains():
    words = tiny_model(**TWO_STAGES, vocab_parallel=True, pipeline_schedule="v-half")
    first, last = run_ranks(2, output_of_training, words)
    banner = [line.removeprefix("megatron_vp: ") for line in first.splitlines() if line.startswith("megatron_vp: ")]
    assert "megatron_vp: " not in last
    versions, *described = banner
    assert described == describe_run(check_job(words, 2), 2)
    assert f"megatron_vp {__version__}" in versions and f"torch {torch.__version__}" in versions
    assert described[0] == "2 ranks = 2 pipeline x 1 data; 4 microbatches; v-half, vocab-2"
    assert any(line.startswith("vocabulary rows by pipeline rank: equal (--vocab-shards ") for line in described)
    assert first.index("end of arguments") < first.index(versions) < first.index("before the start of training step")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            [
                "2 ranks = 2 pipeline x 1 data; 4 microbatches; "
                "Megatron's own schedule, Megatron's own vocabulary layers"
            ],
        ),
        ({"pipeline_model_parallel_layout": "Et|tttL"}, ["layers by stage: 1,3"]),
        (
            {"vocab_parallel": True, "vocab_shards": "200,312"},
            ["vocabulary rows by pipeline rank: 200,312 (--vocab-shards 200,312)"],
        ),
    ],
    ids=str,
)
def test_every_job_is_described(changes, said):
    lines = describe_run(check_job(["--cpu", *tiny_model(**TWO_STAGES | changes)], 2), 2)
    assert [line for line in said if line not in lines] == [], lines


def test_a_loop_of_ones_own_is_told_of_no_unknown_batch(capsys):
    job = check_job(["--cpu", *tiny_model(**TWO_STAGES, vocab_parallel=True)], 2)
    print_banner(job, knows_batch=False)
    said = capsys.readouterr().out
    assert "2 ranks = 2 pipeline x 1 data; 1f1b, vocab-2\n" in said
    assert "microbatches" not in said
