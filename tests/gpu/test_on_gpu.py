"""Test that the time limits of GPU measurements agree between script and page, and fit into the available GPU time."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

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


@pytest.fixture
def hold():
    pytest.importorskip("triton", reason="Triton is not installed")
    sys.path.append(str(ROOT / "benchmarks"))
    from overlap_tax import hold

    return hold


def test_a_held_block_waits_for_the_end_of_the_pass(hold):
    """In Triton's interpreter: until the flag is up, or for as many looks as it is given."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flag, left = (torch.zeros(size, dtype=torch.int32, device=device) for size in (1, 3))
    hold[(3,)](flag, left, 5)
    assert left.tolist() == [0, 0, 0], "the flag never came"
    hold[(3,)](flag.fill_(1), left, 5)
    assert left.tolist() == [5, 5, 5]


COMPILE = """
import sys
sys.path.append(sys.argv[1])
import torch
torch.cuda.is_available = lambda: True  # else the benchmark chooses the interpreter
from overlap_tax import hold
from tests.vocab.compile_kernels import compiled_only, empty

with compiled_only(90) as made:
    hold[(4,)](empty(1, dtype=torch.int32), empty(64, dtype=torch.int32), 1 << 24, num_warps=16)
print(made[0][1].asm["ptx"])
"""


@pytest.mark.slow
def test_compiled_it_looks_at_memory_again_and_again(hold):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(ROOT / "benchmarks")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    loop = re.search(r"^(\$L__BB0_\d+):(?:(?!\n\$L__BB).)*ld\.volatile\.global(.*?)bra\s+\1;", done.stdout, re.M | re.S)
    assert loop, done.stdout
