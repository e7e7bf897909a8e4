"""Test --log-pipeline-interval: the pipeline scalars that a run writes to TensorBoard, read from the event file."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_vp.mcore.reports import pipeline_scalars
from megatron_vp.runtime import launcher_store
from megatron_vp.trace.figures import RankFigures, scalars
from megatron_vp.trace.two_runs import read_losses
from tests.harness.ranks import ROOT, run_ranks_to_their_end
from tests.harness.training import tiny_model, train
from tests.mcore.faults import train_with_fault

ALWAYS = {"pipeline/bubble", "pipeline/busy-fastest-rank", "pipeline/busy-slowest-rank"}
OF_VOCABULARY = {"pipeline/vocabulary-share", "pipeline/second-stream-hidden"}


def curves(folder):
    """Values by iteration, by the name of the curve."""
    events = EventAccumulator(str(folder)).Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("pipeline/")]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


@pytest.mark.parametrize(
    ("ranks", "changes", "names", "iterations"),
    [
        (2, {"vocab_parallel": True, "log_pipeline_interval": 1}, ALWAYS | OF_VOCABULARY, [1, 2, 3, 4]),
        (
            4,
            {"log_pipeline_interval": 2},
            ALWAYS,
            [2, 4],
        ),  # two replicas: another pipeline than the reporting one writes
        pytest.param(2, {"pipeline_schedule": "zb-v", "log_pipeline_interval": 3}, ALWAYS, [3], marks=pytest.mark.slow),
        pytest.param(
            2,
            {"num_layers_per_virtual_pipeline_stage": 1, "log_pipeline_interval": 1},
            ALWAYS,
            [1, 2, 3, 4],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_writes_how_busy_its_pipeline_was(tmp_path, ranks, changes, names, iterations):
    report = tmp_path / "report" if ranks == 2 else None  # which needs more than the curves do
    train(
        ranks,
        tiny_model(
            pipeline_model_parallel_size=2, train_iters=4, tensorboard_dir=tmp_path, rank_report=report, **changes
        ),
    )
    found = curves(tmp_path)
    assert set(found) == names and all(list(values) == iterations for values in found.values())
    for iteration in iterations:
        at = {name.removeprefix("pipeline/"): values[iteration] for name, values in found.items()}
        assert 0 <= at["bubble"] < 1 and 0 < at["busy-fastest-rank"] <= at["busy-slowest-rank"]
        assert all(0 < at[name.removeprefix("pipeline/")] < 1 for name in names & {"pipeline/vocabulary-share"})
        assert all(0 <= at[name.removeprefix("pipeline/")] <= 1 for name in names & OF_VOCABULARY)


def test_the_curves_are_those_of_all_ranks():
    ranks = [RankFigures(100, 80, 20, 0, 10, 9), RankFigures(90, 60, 15, 0, 10, 6)]
    assert scalars(ranks) == pytest.approx(
        {
            "pipeline/bubble": 0.3,
            "pipeline/busy-fastest-rank": 0.06,
            "pipeline/busy-slowest-rank": 0.08,
            "pipeline/vocabulary-share": 0.25,
            "pipeline/second-stream-hidden": 0.75,
        }
    )
    assert set(scalars([RankFigures(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)])) == ALWAYS


def test_figures_that_a_rank_did_not_send_do_not_end_the_run(monkeypatch, capsys):
    store = torch.distributed.HashStore()
    args = SimpleNamespace(
        rank=0, world_size=1, train_iters=1, log_interval=1, log_pipeline_interval=1, pipeline_model_parallel_size=2
    )
    monkeypatch.setattr(launcher_store, "launcher_store", lambda: store)
    monkeypatch.setattr(pipeline_scalars, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(pipeline_scalars, "current", lambda: SimpleNamespace(args=args))
    assert pipeline_scalars._by_interval(lambda *given, **named: True)({}, {}, 0.1, 1) is True
    assert "> no pipeline metrics of iteration 1: no word from ranks 0 and 1\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_benchmark_of_what_the_curves_cost_runs():
    """On sleeping ranks. How much it is says nothing where other tests run."""
    sizes = ("--ranks", "2", "--microbatches", "4", "--pass-ms", "2", "--iterations", "2", "--schedule", "v-half")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "log_interval.py"), *sizes],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["schedule"] == "v-half" and row["median_ratio"] > 0 and set(row["curves"]) == ALWAYS | OF_VOCABULARY


def test_each_line_of_the_log_has_the_loss_of_its_own_iteration_as_tensorboard_has(tmp_path):
    """Plain Megatron's second line after a start has the mean of two iterations."""
    ((status, output),) = run_ranks_to_their_end(1, train_with_fault, tiny_model(tensorboard_dir=tmp_path, lr=0.1))
    assert status == 0, output
    (tmp_path / "log").write_text(output)
    losses = EventAccumulator(str(tmp_path)).Reload().Scalars("lm loss")
    assert read_losses(tmp_path / "log") == pytest.approx({each.step: each.value for each in losses}, rel=1e-6)
