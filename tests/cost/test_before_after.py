"""Test that the picture and the table at the top of the README match the current cost model."""

import importlib.util
import sys
from pathlib import Path

import pytest

from megatron_vp.schedule import PassKind

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("before_after", ROOT / "scripts" / "before_after.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(script):
    return script.runs(script.request())


def test_the_readme_shows_the_present_predictions(script, runs):
    page = script.README.read_text(encoding="utf-8")
    assert script.written(page, runs) == page


def test_the_tuned_megatron_is_the_fastest_that_fits(script, runs):
    tuned = runs[1]
    assert tuned.prediction.plan.layers is not None and tuned.prediction.job == runs[2].prediction.job
    assert tuned.prediction.fits() and runs[0].seconds > tuned.seconds > runs[2].seconds


def test_the_picture_shows_the_present_predictions(script, runs):
    assert script.stored_digest() == script.digest(runs)


def test_the_picture_cuts_whole_vocabulary_layers_out_of_the_passes_that_hold_them(script, runs):
    """Of plain 1F1B, on the last rank, by the layers' own times, and nothing on ranks without such a layer."""
    plain, ours = runs[0], runs[2]
    work = {rank: sum(b.end - b.start for b in plain.boxes(rank) if b.colour == "vocabulary") for rank in range(8)}
    assert work[7] > 0.5 and 0 < work[0] < 0.1 and not any(work[rank] for rank in range(1, 7))
    assert 0.3 < plain.vocabulary_share(7, PassKind.F) < 0.6
    assert all(ours.vocabulary_share(stage, PassKind.F) == 0 for stage in range(8))


def test_the_picture_counts_all_of_a_ranks_memory(runs):
    for run in runs:
        for rank, memory in enumerate(run.prediction.memory):
            assert sum(run.memory(rank).values()) * 2**30 == pytest.approx(memory.total)
