"""Test that every command accepts a job in the same form as training: files, with or without `--config`, and flags."""

from pathlib import Path
from unittest import mock

import pytest

from megatron_vp.cli.app import main
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import arguments
from megatron_vp.jobs.known_options import files_and_flags

BOTH = ["a.yaml", "b.yaml"]
FLAGS = ["--lr", "-1", "--vocab-parallel", "--data-path", "0.5", "x"]
SPELLINGS = [
    ["a.yaml", "--config", "b.yaml", *FLAGS],
    ["--config", "a.yaml", "--config=b.yaml", *FLAGS],
    ["a.yaml", *FLAGS, "--config", "b.yaml"],
]
ASKED = {
    "plan": ([], "megatron_vp.cli.plan.read_cluster", lambda files, flags, *_: arguments(files, flags)),
    "simulate": ([], "megatron_vp.cli.simulate.read_cluster", lambda files, flags, *_: arguments(files, flags)),
    "check": (["--ranks", "4"], "megatron_vp.mcore.start.preflight.check_job", lambda words, _: words),
    "sbatch": (
        ["--nodes", "1", "--node-software", "te=no"],  # Otherwise, sbatch reads the files itself.
        "megatron_vp.mcore.start.preflight.check_job",
        lambda words, _: words,
    ),
    "replay": (
        ["--rank", "0"],
        "megatron_vp.mcore.replay.one_rank.run_alone",
        lambda _, files, _rank, _ranks, _iterations, flags, _shapes: arguments(files, flags),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=" ".join)
@pytest.mark.parametrize("command", ASKED)
def test_every_command_takes_a_job_as_training_does(capsys, command, spelling):
    own, target, words = ASKED[command]

    def ask(*given, **_):
        raise UserError(" ".join(words(*given)))

    with mock.patch(target, ask), pytest.raises(SystemExit):
        main([command, *own, *spelling])
    expected = " ".join(["--config", "a.yaml", "--config", "b.yaml", *FLAGS])
    assert capsys.readouterr().err == f"megatron-vp: error: {expected}\n"


def test_the_value_of_a_flag_is_no_configuration():
    assert files_and_flags(["--lr", "1e-4"], None) == ([], ["--lr", "1e-4"])
    assert files_and_flags(None, None) == ([], [])


@pytest.mark.parametrize(
    "words",
    [
        "job.yaml --cpu --lr 1 --bf16 --data-path 0.5 a",
        "--cpu job.yaml --lr 1 --bf16 --data-path 0.5 a",
        "--cpu --lr 1 job.yaml --bf16 --data-path 0.5 a",
        "--cpu --lr=1 job.yaml --bf16 --data-path 0.5 a",
        "--cpu --lr 1 --bf16 job.yaml --data-path 0.5 a",
    ],
)
def test_the_configuration_may_stand_after_flags(words):
    files, flags = files_and_flags(words.split(), [Path("more.yaml")])
    assert files == [Path("job.yaml"), Path("more.yaml")]
    assert " ".join(flags).replace("=", " ") == "--cpu --lr 1 --bf16 --data-path 0.5 a"


def test_words_that_could_be_two_configurations_are_left_to_the_parser():
    words = ["--bf16", "a.yaml", "--fp16", "b.yaml"]
    assert files_and_flags(words, None) == ([], words)
    assert files_and_flags(["--own-option", "job.yaml"], None) == ([], ["--own-option", "job.yaml"])
