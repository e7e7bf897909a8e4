"""Test that the time limits of GPU measurements agree between script and page, and fit into the available GPU time."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.harness.ranks import ROOT

CALLS = (590, 150, 600, 600)
"""Seconds of each call at most. The first two are a visit of 15 minutes, of which starting the machine takes two."""


@pytest.fixture(scope="module")
def limits():
    """Seconds by step, in order, for every call."""
    said = subprocess.run(
        ["bash", "benchmarks/on_gpu.sh", "--limits"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    found, steps = [], {}
    for line in said.splitlines():
        name, seconds = line.rsplit(" ", 1)
        if not name.startswith("call"):
            steps[name] = int(seconds)
            continue
        assert name == f"call {len(found) + 1}:" and int(seconds) == sum(steps.values())
        found.append(steps)
        steps = {}
    return found


def test_every_call_and_the_first_visit_end_in_time(limits):
    assert all(0 < sum(steps.values()) <= most for steps, most in zip(limits, CALLS, strict=True))


def test_the_page_has_every_step_of_the_first_visit_with_its_limit(limits):
    page = (ROOT / "docs" / "guides" / "first_gpu.md").read_text()
    rows = re.findall(r"^\| (\d) \| `(\w+)` \| .* \| (\d+) \|$", page, re.MULTILINE)
    expected = [
        (str(call), name, str(seconds))
        for call, steps in enumerate(limits[:2], start=1)
        for name, seconds in steps.items()
    ]
    assert rows == expected
    minutes = -(-sum(sum(steps.values()) for steps in limits[:2]) // 60)
    assert f"one GPU, {minutes} minutes" in page


def test_an_unknown_step_is_refused(tmp_path):
    done = subprocess.run(
        ["bash", "benchmarks/on_gpu.sh", str(tmp_path / "new"), "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2 and "unknown call or step 5" in done.stderr
    assert not (tmp_path / "new").exists()
