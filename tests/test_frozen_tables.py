"""Test that frozen programs and predictions hold, in a sample of what `benchmarks/frozen.py` compares."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import frozen

PROGRAMS, JOBS = (json.loads((frozen.FOLDER / f"{name}.json").read_text()) for name in ("programs", "jobs"))


@pytest.mark.parametrize("size", [(2, 7), (3, 8)])
def test_programs(size, monkeypatch):
    monkeypatch.setattr(frozen, "SIZES", (size,))
    found = dict(frozen.programs())
    assert len(found) == len(PROGRAMS) / 8
    assert not [*frozen.differences({words: PROGRAMS[words] for words in found}, found, "programs")]


@pytest.mark.parametrize("words", frozen.JOBS[::3])
def test_prediction(words, monkeypatch):
    monkeypatch.setattr(frozen, "JOBS", (words,))
    ((_, found),) = frozen.jobs()
    assert not [*frozen.differences(JOBS[words], json.loads(json.dumps(found)), words)]
