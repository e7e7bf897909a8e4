"""Test how a refused job ends: the last line of its log has the reason, and no other line says error."""

import os
import re
import sys

import pytest

from tests.harness.ranks import run_ranks_to_their_end
from tests.harness.training import tiny_model

RANKS = 4
VP = {"pipeline_model_parallel_size": 4, "vocab_parallel": True}
EVERYWHERE = [
    (
        {**VP, "freeze_all_layers": True, "ckpt_format": "torch", "save": "there", "save_interval": 1},
        "--vocab-parallel with --freeze-all-layers",
    ),
    ({"pipeline_model_parallel_size": 3, "num_layers": 3}, "AssertionError: world size "),
]
"""Jobs that all ranks refuse, with the beginning of the line."""


def refused_start(rank, _world_size, words, log, others=()):
    """A start that prints into the job's one log, as under a launcher; the last rank gets `others` more words."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["pretrain_gpt_vp.py", *words, *(others if rank == RANKS - 1 else ())]
    import pretrain_gpt_vp as script

    print("a line of rank", rank)
    script.prepare()
    with script.one_line_errors():
        script.main()


def log_of(folder, changes, others=()):
    log = folder / "log"
    ends = run_ranks_to_their_end(RANKS, _to_the_end, tiny_model(**changes), str(log), others)
    assert [status for status, _ in ends] == [2] * RANKS
    return log.read_text().splitlines()


def _to_the_end(rank, world_size, *args):
    try:
        refused_start(rank, world_size, *args)
    except SystemExit as end:
        os._exit(end.code)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(*case, marks=[] if number < 2 else pytest.mark.slow, id=case[1][:40])
        for number, case in enumerate(EVERYWHERE)
    ],
)
def test_the_last_line_of_the_log_says_why_and_no_other_says_error(tmp_path, changes, said):
    *lines, last = log_of(tmp_path, changes)
    assert re.match(f"error: ({said})", last), last
    assert not [line for line in lines if "error" in line.lower()]
    assert sum(line.startswith("a line of rank") for line in lines) == RANKS
    assert not any("end of arguments" in line for line in lines)


def test_a_rank_that_was_given_something_else_is_named(tmp_path):
    *lines, last = log_of(tmp_path, {**VP, "no_such_option": True}, others=["--nor-this"])
    assert re.match(r"3 ranks \(the first is rank 0\): error: unrecognized arguments: --no-such-option; ", last), last
    assert not [line for line in lines if "error" in line.lower()]
