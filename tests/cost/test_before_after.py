"""Test that the picture and the table at the top of the README match the current cost model."""

import importlib.util
import sys
from pathlib import Path

import pytest

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


def test_the_picture_shows_the_present_predictions(script, runs):
    assert script.stored_digest() == script.digest(runs)
