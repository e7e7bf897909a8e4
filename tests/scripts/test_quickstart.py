"""Test the quick start, the first command that a new user runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vp.schedule import VocabMethod
from megatron_vp.trace.rank_reports import RankReport
from megatron_vp.trace.two_runs import RecordedRun

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "quickstart.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_a_rank_without_rows_has_no_vocabulary_passes(script):
    layers = {"F": 8.0, "B": 16.0}
    of_ranks = [layers | {"S": 4.0, "T": 4.0, "IF": 0.8, "IB": 0.8}] * 3 + [layers]
    ranks = tuple(
        RankReport(0, 1, 0, (8,), 1.0, (0.03,), ({kind: time / 1e3 for kind, time in each.items()},), None, "", {})
        for each in of_ranks
    )
    run = RecordedRun(ranks, {1: 1.0})
    assert pytest.approx((5e-4, 5e-4, 5e-4, 0)) == script.measured_costs(run, VocabMethod.VOCAB_2).S
    assert script.predicted_seconds(run, VocabMethod.VOCAB_2, 4) > 8 * 4e-3


@pytest.mark.slow
def test_it_trains_twice_and_compares(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path), "--iterations", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "largest relative difference between the two loss curves" in done.stdout
    assert (tmp_path / "report.png").exists() and (tmp_path / "schedule.png").exists()
    report = [sys.executable, "-m", "megatron_vp.cli.app", "report", str(tmp_path / "plain"), str(tmp_path / "vocab-2")]
    said = subprocess.run(report, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in said.stdout.splitlines() if line.strip()]
    assert said.returncode == 0 and len(lines) > 8 and all(line in done.stdout for line in lines), said.stdout
