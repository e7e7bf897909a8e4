"""Ranks that were not given the same job, by a node with another file or installation, say so and end together."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.training import tiny_model

VP = {"pipeline_model_parallel_size": 2, "vocab_parallel": True}


def start_apart(rank, _world_size, arguments):
    """Exit status and last line of a rank of a job whose ranks have arguments of their own."""
    import pretrain_gpt_vp as script
    from megatron_vp.mcore.start import launch

    sys.argv = ["pretrain_gpt_vp.py", *arguments[rank]]
    launch._exit = sys.exit  # the rank reports, so its process has to live on
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        script.prepare()
        with script.one_line_errors():
            script.main()
    return stop.value.code, errors.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch_size": 16}, "global_batch_size is 8 on rank 0, 16 on rank 1"),
        pytest.param(
            {"vocab_parallel": None}, "vocab_parallel is True on rank 0, False on rank 1", marks=pytest.mark.slow
        ),
        pytest.param(
            {"pipeline_schedule": "zb-h1"},
            "pipeline_schedule is 1f1b on rank 0, zb-h1 on rank 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"vocab_shards": "300,212"},
            "vocab_rows is None on rank 0, (300, 212) on rank 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_of_different_jobs_end_with_one_line_each(changes, said):
    arguments = [tiny_model(**VP), tiny_model(**VP | changes)]
    for rank, (status, line) in enumerate(run_ranks(2, start_apart, arguments)):
        assert status == 2
        assert line.startswith(f"rank {rank}: error: the ranks were not given the same job: {said}; start all of them")


def test_places_of_files_may_differ_and_versions_may_not():
    from megatron_vp.mcore.start.same_job import difference, facts

    here = facts({"rank": 0, "lr": 0.1, "save": "/a"})
    there = facts({"rank": 1, "lr": 0.1, "save": "/b"})
    assert here == there
    assert facts({"vocab_rows": (300, 212)}) != facts({"vocab_rows": None}) != facts({"vocab_rows": (0, 512)})
    older = here | {"the version of torch": "2.6"}
    assert difference([here, here, older]).endswith(" on 2 ranks (the first is 0), 2.6 on rank 2")


def test_two_checkouts_of_one_version_are_told_apart(tmp_path):
    from megatron_vp.mcore.start.same_job import code

    checkouts = [tmp_path / name for name in ("one", "copy", "edited")]
    for checkout in checkouts:
        (checkout / "inner").mkdir(parents=True)
        (checkout / "inner" / "module.py").write_text("step = 1\n")
        (checkout / "__init__.py").touch()
    (checkouts[1] / "notes.txt").write_text("no code")
    (checkouts[2] / "inner" / "module.py").write_text("step = 2\n")
    one, copy, edited = map(code, checkouts)
    assert one == copy != edited
