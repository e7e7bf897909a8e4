"""The machine code of the kernels, compiled for GPUs that are not there: counts held by a committed table."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from megatron_vp.vocab.kernels import softmax  # noqa: E402
from tests.vocab.compile_kernels import (  # noqa: E402
    COUNTED,
    VOCABULARIES,
    Counts,
    _read,
    first_widths,
    read_table,
    softmax_of,
)


def _compile(*arguments: str) -> str:
    """What the interpreter accepts, the compiler may not: down to machine code it needs no GPU, but no interpreter."""
    if not os.access(triton.knobs.nvidia.ptxas.path, os.X_OK):
        pytest.skip("this Triton comes without ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.vocab.compile_kernels", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _counts(*arguments: str) -> list[Counts]:
    return [_read(line) for line in csv.DictReader(_compile(*arguments).splitlines())]


def _softmax(lines: list[Counts]) -> list[Counts]:
    return [line for line in lines if line.kernel == "_exponentiate" and not line.smoothed]


def _assert_limits(lines: list[Counts]) -> None:
    assert not [line for line in lines if line.spilt]
    for line in _softmax(lines):
        assert (line.load_bits, line.store_bits) == (128, 128), line
        if line.width <= 16384:
            assert line.warps_per_multiprocessor == 64, line
        if line.width >= 4096:
            assert line.per_element <= (13 if line.width > 32768 else 16), line


def test_kernels_are_no_slower_than_the_committed_counts():
    lines = _counts()
    _assert_limits(lines)
    known = {line.key: line for line in read_table()}
    if not any(line.triton == triton.__version__ for line in known.values()):
        return  # another Triton than those of the table: its limits have to do
    assert {line.key for line in lines} == {key for key in known if key[0] == triton.__version__}
    for line in lines:
        held = known[line.key]
        assert line.registers <= held.registers and line.warps_per_multiprocessor >= held.warps_per_multiprocessor, line
        assert line.instructions <= held.instructions and (line.per_element or 0) <= (held.per_element or 0), line
        assert line.load_bits >= held.load_bits and line.store_bits >= held.store_bits, line


def test_the_committed_counts_are_within_the_limits():
    lines = read_table()
    assert {line.triton for line in lines} == {"3.6.0", "3.9.0"}
    _assert_limits(lines)
    for version in ("3.6.0", "3.9.0"):
        widths = {line.width for line in _softmax(lines) if line.triton == version and line.dtype == "bfloat16"}
        assert widths == {shape.columns for shape in COUNTED if shape.softmax_alone or shape.columns == 8192}
        assert widths >= set(VOCABULARIES.values())


def test_a_counted_width_bounds_every_other():
    """At every width of shards, even or not, some counted row, no wider, is handled by the same kernel."""
    lines = [line for line in read_table() if line.triton == "3.9.0" and line.dtype == "bfloat16"]
    counted = {(softmax_of(line.width), line.width) for line in _softmax(lines)}
    assert len(first_widths()) == 19
    for columns in range(64, softmax.LARGEST_ROW + 1, 64):
        assert any(same == softmax_of(columns) and width <= columns for same, width in counted), columns


def test_no_number_makes_another_kernel():
    """Rows per microbatch, tokens, shards, their rows: Triton compiles another kernel for 1 and for multiples of 16."""
    variants = dict(line.split() for line in _compile("--variants").splitlines())
    assert len(variants) == 6
    assert set(variants.values()) == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_kernel_spills_registers(capability):
    lines = _counts("--capabilities", str(capability), "--all")
    assert len(lines) > 150
    assert not [line for line in lines if line.spilt]
