"""Test ranks that die, stall, fail or are told to end in the middle of a schedule, and runs that are restarted."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from enum import Enum

import pytest

from tests.harness import run_ranks_to_their_end, train
from tests.harness.ranks import ROOT
from tests.mcore.faults import (
    LIMIT,
    Fault,
    die,
    errors,
    fail,
    few_steps,
    hang,
    stop,
    terminate,
    train_with_fault,
)

THREE = {"pipeline_model_parallel_size": 3, "num_layers": 3}
FOUR = {"pipeline_model_parallel_size": 4, "num_layers": 8}
WAITED = r"^error: rank {rank} (waited|was) .* microbatch \d+.*"


def _said(output, rank):
    lines = [line for line in output.splitlines() if re.match(WAITED.format(rank=rank), line)]
    assert lines, f"rank {rank} did not say where it was:\n{output}"
    return lines[-1]


class Loss(Enum):
    """How the others lose a rank."""

    KILLED = "killed"
    STOPPED = "stopped"
    TOLD = "stopped, all told to end"


V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
DEFAULT = [("v-half", False, Loss.KILLED), ("zb-v", False, Loss.TOLD)]
# Each schedule and each loss with and without vocabulary passes.
OTHERS = [
    ("zb-v", True, Loss.STOPPED),
    ("v-half", True, Loss.TOLD),
    ("v-min", True, Loss.KILLED),
    ("dualpipe-v", True, Loss.KILLED),
    ("dualpipe-v", False, Loss.TOLD),
]
LOST = [
    pytest.param(3, {**THREE, "pipeline_schedule": "1f1b"}, 1, Loss.STOPPED, marks=pytest.mark.slow),
    *(
        pytest.param(
            *(4, {**FOUR, "pipeline_schedule": schedule, "vocab_parallel": sharded}, 1, loss),
            marks=() if (schedule, sharded, loss) in DEFAULT else pytest.mark.slow,
        )
        for schedule, sharded, loss in (*DEFAULT, *OTHERS)
    ),
]


@pytest.mark.parametrize(
    ("ranks", "options", "lost", "loss"),
    LOST,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_the_others_end_and_name_the_rank_that_is_lost(ranks, options, lost, loss):
    """Also where the last stage, and with it messages for the loss function, is on rank 0."""
    fault = Fault(die if loss is Loss.KILLED else stop, lost, "F")
    if loss is Loss.TOLD:  # before the limit is reached
        options = {**options, "distributed_timeout_seconds_after_init": 12}
    ends = run_ranks_to_their_end(
        *(ranks, train_with_fault, few_steps(**options), fault),
        stopped=None if loss is Loss.KILLED else lost,
        told_after=8 if loss is Loss.TOLD else None,
    )
    others = [rank for rank in range(ranks) if rank != lost]
    lines = [_said(ends[rank][1], rank) for rank in others]
    assert not any("Traceback" in output for _, output in ends)
    if loss is Loss.KILLED:
        assert ends[lost][0] == -signal.SIGKILL
    # Where this machine was slow, a rank's time was up before it was told to end.
    assert all(ends[rank][0] in ((128 + signal.SIGTERM, 1) if loss is Loss.TOLD else (1,)) for rank in others)
    told = "when it received SIGTERM" if loss is Loss.TOLD else f"; no word from rank {lost}"
    assert all(line.endswith((told, f"; no word from rank {lost}")) for line in lines), lines


def test_a_rank_whose_data_hangs_says_so():
    ends = run_ranks_to_their_end(3, train_with_fault, few_steps(**THREE), Fault(hang, 0, "tokens"))
    assert [status for status, _ in ends] == [1, 1, 1]
    culprit = "rank 0 was reading the data of microbatch 2"
    assert f"{culprit} ({LIMIT} s)" in _said(ends[0][1], 0)
    assert all(_said(ends[rank][1], rank).endswith(f"; {culprit}") for rank in (1, 2))


def test_a_defect_keeps_its_traceback_and_ends_all_ranks():
    ends = run_ranks_to_their_end(3, train_with_fault, few_steps(**THREE), Fault(fail, 1, "F"))
    assert [status for status, _ in ends] == [1, 1, 1]
    said = ends[1][1]
    assert "Traceback" in said and re.search(r"RuntimeError: a defect\n.*rank 1 was in pass F of microbatch 2", said)


def test_a_rank_that_is_told_to_end_says_where_it_was():
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(), Fault(terminate, 1, "F"))
    assert [status for status, _ in ends] == [1, 128 + signal.SIGTERM]
    assert re.match(r"rank 1 (waited|was) .* when it received SIGTERM$", errors(ends[1][1])[0])


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_schedule": "v-half"},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_model_parallel_size": 1, "use_distributed_optimizer": True}, marks=pytest.mark.slow),
    ],
    ids=["v-half", "workers of data loaders", "replicas"],
)
def test_sigterm_saves_after_the_iteration_and_the_run_goes_on_from_there(options, tmp_path):
    options = {**options, "vocab_parallel": "pipeline_model_parallel_size" not in options}
    saving = {"save": tmp_path, "save_interval": 100, "exit_signal_handler": True}
    ends = run_ranks_to_their_end(
        2, train_with_fault, few_steps(**options, **saving), Fault(terminate, 1, "loss", (1,))
    )
    assert [status for status, _ in ends] == [0, 0]
    assert "exiting program after receiving SIGTERM" in ends[0][1] and not errors(ends[0][1] + ends[1][1])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    whole = train(2, few_steps(**options), same_weights=False)
    rest = train(2, few_steps(**options, load=tmp_path), same_weights=False)
    assert rest.losses == whole.losses[3:]


@pytest.mark.slow
def test_ranks_that_a_launcher_starts_again_go_on_with_the_same_losses(tmp_path):
    saving = {"save": tmp_path / "checkpoints", "load": tmp_path / "checkpoints", "save_interval": 1}
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
        ),
        *(str(ROOT / "tests" / "mcore" / "dies_once.py"), str(tmp_path), *few_steps(**saving)),
    ]
    environment = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output", "w") as output:
        status = subprocess.call(
            command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, timeout=300
        )
    said = (tmp_path / "output").read_text()
    assert status == 0 and "error: rank 0 waited for" in said, said
    rest = pickle.loads((tmp_path / "rank1").read_bytes())
    whole = train(2, few_steps(), same_weights=False)
    assert rest.losses == whole.losses[2:] and rest.grad_norms == whole.grad_norms[2:]
