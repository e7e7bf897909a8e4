"""The roofline table of docs/gpu.md, from the committed counts."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from roofline import DEVICES, Shape, s_over_gemm, softmax_times, t_over_gemm, table  # noqa: E402


def test_the_page_shows_the_table():
    assert table() in (ROOT / "docs" / "gpu.md").read_text()


def test_a_shape_worked_out_by_hand():
    h100, shape = DEVICES[0], Shape(2048, 8192, 4096)
    memory, issue = softmax_times(shape, h100)
    assert memory == pytest.approx(4 * 2048 * 8192 / 3.0e12) and issue == pytest.approx(11.5e-6, rel=0.02)
    gemm = 2 * 2048 * 8192 * 4096 / 700e12
    assert s_over_gemm(shape, h100) == pytest.approx(1 + (memory + 2.5e-6) / gemm)
    assert t_over_gemm(shape, h100) == pytest.approx(1 + (4 * 2048 * 4096 / 3.0e12 + 2.5e-6) / gemm)


def test_memory_bounds_the_softmax_on_hopper():
    for device in DEVICES[:2]:
        for columns in (8192, 32768):
            memory, issue = softmax_times(Shape(2048, columns, 4096), device)
            assert issue < memory
