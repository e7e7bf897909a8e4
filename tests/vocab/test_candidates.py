"""Test the candidates of `benchmarks/candidates.py`, in Triton's interpreter and compiled for an absent GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from megatron_vp.vocab.kernels import softmax  # noqa: E402
from megatron_vp.vocab.operations import EagerOperations  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from softmax_ways import exponentiate_block, launches  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("columns", [4096, 9536, 20000])
def test_every_launch_computes_the_same(monkeypatch, columns):
    logits = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    labels = torch.tensor([0, columns - 1, -1], device=DEVICE)
    expected = logits.double()
    statistics, target, _ = EagerOperations().exponentiate_(expected, labels, 0, 1.0)
    for name, launch in launches(columns, torch.bfloat16).items():
        monkeypatch.setattr(softmax, "launch_for", lambda columns, dtype, launch=launch: launch)
        found = logits.clone()
        fused = softmax.exponentiate_(found, labels, 0, 1.0)
        assert torch.equal(fused[1], target), name
        torch.testing.assert_close(fused[0].double(), statistics, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("width", [16, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_with_one_reference_per_row(dtype, width):
    """One row's logits rise by far more than a reference may be off, in its last block."""
    columns = 100
    logits = torch.randn(4, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    logits[1] += 200 * (torch.arange(columns, device=DEVICE) // 30)
    logits[2, 99] += 50  # within the range
    target = torch.tensor([0, 99, 31, -1], device=DEVICE)
    exp, statistics = logits.clone(), torch.zeros(3, 4, device=DEVICE)
    for start in range(0, columns, width):
        exponentiate_block(exp, target, statistics, start, min(width, columns - start))
    wide = logits.double()
    reference, total, picked = statistics.double()
    torch.testing.assert_close(reference + total.log(), wide.logsumexp(-1), rtol=1e-6, atol=1e-6)
    owned = target >= 0
    torch.testing.assert_close(picked, torch.where(owned, wide.gather(1, target.clamp(0)[:, None])[:, 0], 0))
    expected = (wide - reference[:, None]).exp()
    expected[owned, target[owned]] = 0
    torch.testing.assert_close(exp.double(), expected, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
    assert (wide.amax(-1) - reference).max() <= 60


COMPILE = """
import sys
sys.path.append(sys.argv[1])
import torch
from softmax_ways import exponentiate_block, launches
from megatron_vp.vocab.kernels import softmax
from tests.vocab.compile_kernels import compiled_only, empty
from tests.vocab.machine_code import MachineCode

with compiled_only(90) as made:
    for columns in (8192, 32768):
        for launch in launches(columns, torch.bfloat16).values():
            exp = empty(2048, columns, dtype=torch.bfloat16)
            softmax.launch_for = lambda *row: launch
            softmax.exponentiate_(exp, empty(2048, dtype=torch.int64), 0, 1.0)
    for start in (0, 8192):
        exponentiate_block(exp[:1024], empty(1024, dtype=torch.int64), empty(3, 1024), start, 8192)
for name, kernel in made:
    print(name, MachineCode(kernel).resources[1])
"""


def test_candidates_compile_without_spilling_registers():
    if not os.access(triton.knobs.nvidia.ptxas.path, os.X_OK):
        pytest.skip("this Triton comes without ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(BENCHMARKS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, _ in lines].count("_exponentiate_block") == 2
    assert all(spilt == "0" for _, spilt in lines)
