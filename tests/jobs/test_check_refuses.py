"""`megatron-vp check` and `sbatch` refuse what a start of the job refuses from its arguments."""

import shlex

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore.start.preflight import check_files, check_job
from tests.harness.training import tiny_model


def check(flags, **settings):
    args = check_job(["--cpu", *tiny_model(pipeline_model_parallel_size=2, **settings), *shlex.split(flags)], 2)
    check_files(args)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--pipeline-trace-iterations 5-3", "--pipeline-trace-iterations 5-3 is not A-B with 1 <= A <= B"),
        ("--pipeline-trace-iterations now", "--pipeline-trace-iterations now is not A-B"),
        (
            "--vocab-parallel --pipeline-trace {folder} --pipeline-trace-iterations 90",
            "--pipeline-trace-iterations 90 begins after the last of --train-iters",
        ),
        ("--padded-vocab-size 32", "--padded-vocab-size 32 is smaller than the tokenizer's vocabulary of 63"),
        ("--no-pad-vocab-size --padded-vocab-size 32", "is smaller than the tokenizer's vocabulary of 63"),
        ("--vocab-parallel-algorithm vocab-1", "has no effect without --vocab-parallel: add --vocab-parallel"),
        ("--log-straggler", "--log-straggler is the script's to serve"),
    ],
)
def test_what_training_refuses_is_refused(tmp_path, flags, said):
    with pytest.raises(UserError) as refused:
        check(flags.format(folder=tmp_path / "trace"), vocab_size=63)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_vocabulary_with_room_for_all_tokens_is_taken():
    check("--padded-vocab-size 63 --no-pad-vocab-size", vocab_size=63)
    check("--vocab-parallel --vocab-parallel-algorithm vocab-1")
