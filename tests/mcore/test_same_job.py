"""Test that ranks with different jobs, because a node has another file or installation, report this and exit."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

import pytest
from torch.distributed import HashStore

from tests.harness.ranks import run_ranks
from tests.harness.training import tiny_model

VP = {"pipeline_model_parallel_size": 2, "vocab_parallel": True, "vocab_shards": None}


def start_apart(rank, _world_size, cases):
    """Of each case, exit status and last line of a rank of a job whose ranks have arguments of their own."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    import pretrain_gpt_vp as script
    from megatron_vp.mcore import patches
    from megatron_vp.mcore.start import launch

    launch._exit = sys.exit  # the rank reports, so its process has to live on
    ends = []
    for number, arguments in enumerate(cases):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # the store remembers what was said in it
        sys.argv = ["pretrain_gpt_vp.py", *arguments[rank]]
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
            script.prepare()
            with script.one_line_errors(), mock.patch.object(script, "pretrain", starting(script.pretrain)):
                script.main()
        ends.append((stop.value.code, errors.getvalue().splitlines()[-1:]))
        destroy_global_vars()
        destroy_rerun_state_machine()
        unset_num_microbatches_calculator()
        patches.undo(patches.in_force())
    return ends


def starting(pretrain):
    """Megatron's `pretrain`, which is not to get as far as a model."""

    def start(*args, **kwargs):
        import torch

        with mock.patch("megatron.training.training.setup_model_and_optimizer") as built:
            try:
                pretrain(*args, **kwargs)
            finally:
                assert not built.called and not torch.distributed.is_initialized()

    return start


APART = [
    ({"global_batch_size": 16}, "global_batch_size is 8 on rank 0, 16 on rank 1"),
    ({"iterations_to_skip": [2]}, "iterations_to_skip is [] on rank 0, [2] on rank 1"),
    ({"vocab_shards": "300,212"}, "vocab_shards is balanced on rank 0, 300,212 on rank 1"),
    ({"disable_bias_linear": True}, "add_bias_linear is True on rank 0, False on rank 1"),
    (
        {"pipeline_model_parallel_size": 1, "vocab_parallel": None},
        "pipeline_model_parallel_size is 2 on rank 0, 1 on rank 1",
    ),
    ({"save": "here", "save_interval": 9}, "save is not given on rank 0, given on rank 1"),
]


def test_ranks_of_different_jobs_end_with_one_line():
    cases = [[tiny_model(**VP), tiny_model(**VP | changes)] for changes, _ in APART]
    for ends, (_, said) in zip(zip(*run_ranks(2, start_apart, cases), strict=True), APART, strict=True):
        (status, [line]), last = ends
        assert status == 2 and last == (2, [])
        told = f"error: the ranks did not get the same job: {said}"
        assert line.startswith(told) and "; start every rank with the same" in line


def test_a_rank_that_does_not_arrive_is_named(monkeypatch):
    from megatron_vp.errors import PeerLost
    from megatron_vp.mcore.start.same_job import compare
    from megatron_vp.runtime import launcher_store

    store = HashStore()
    monkeypatch.setattr(launcher_store, "launcher_store", lambda: store)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    launcher_store.Notes("start/others").leave(1)
    with pytest.raises(PeerLost, match=r"there is no word from rank 2 after 0 s"):
        compare({}, 0.1)


def test_places_of_files_may_differ_and_versions_may_not():
    from megatron_vp.mcore.start.same_job import difference, facts

    here = facts({"rank": 0, "lr": 0.1, "save": "/a", "data_path": ["0.3", "/a/x", "0.7", "/a/y"]})
    there = facts({"rank": 1, "lr": 0.1, "save": "/b", "data_path": ["0.3", "/b/x", "0.7", "/b/y"]})
    assert here == there
    otherwise = facts({"rank": 1, "lr": 0.1, "save": "/b", "data_path": ["0.4", "/b/x", "0.6", "/b/y"]})
    assert difference(here, otherwise, 1).startswith(
        "data_path is ['0.3', 'PATH', '0.7', 'PATH'] on rank 0, ['0.4', 'PATH'"
    )
    assert facts({"vocab_rows": (300, 212)}) != facts({"vocab_rows": None}) != facts({"vocab_rows": (0, 512)})
    assert difference(here, here | {"the version of torch": "2.6"}, 2).endswith(" on rank 0, 2.6 on rank 2")


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
