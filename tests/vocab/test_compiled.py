"""Test the machine code of the kernels, compiled for absent GPUs, against a stored table of counts."""

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
    return _run(sys.executable, "-m", "tests.vocab.compile_kernels", *arguments)


def _run(*command: str) -> str:
    """What the interpreter accepts, the compiler may not: down to machine code it needs no GPU, but no interpreter."""
    if not os.access(triton.knobs.nvidia.ptxas.path, os.X_OK):
        pytest.skip("this Triton comes without ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
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


@pytest.mark.parametrize(
    "which", [["--few"], pytest.param([], marks=pytest.mark.slow)], ids=["few", "all of the table"]
)
def test_kernels_are_no_slower_than_the_committed_counts(which):
    lines = _counts(*which)
    _assert_limits(lines)
    known = {line.key: line for line in read_table()}
    if not any(line.triton == triton.__version__ for line in known.values()):
        return  # another Triton than those of the table: its limits have to do
    counted, listed = {line.key for line in lines}, {key for key in known if key[0] == triton.__version__}
    assert counted <= listed and {key[1] for key in counted} == {key[1] for key in listed}
    assert which or counted == listed
    for line in lines:
        held = known[line.key]
        assert line.registers <= held.registers and line.warps_per_multiprocessor >= held.warps_per_multiprocessor, line
        assert line.instructions <= held.instructions and (line.per_element or 0) <= (held.per_element or 0), line
        assert line.load_bits >= held.load_bits and line.store_bits >= held.store_bits, line


def test_capped_logits_spill_no_registers_and_keep_wide_accesses():
    lines = _counts("--capped")
    assert not [line for line in lines if line.spilt]
    assert {(line.load_bits, line.store_bits) for line in _softmax(lines)} == {(128, 128)}


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


SYNCHRONISATION = """
import re
import sys
import torch
from tests.vocab.compile_kernels import Shape, compiled_only, launch_all

for columns in map(int, sys.argv[1:]):
    with compiled_only(90) as made:
        launch_all(Shape(columns=columns, softmax_alone=True))
    ptx = made[0][1].asm["ptx"]
    words = re.findall(r"bar\\.sync|ld\\.shared|ld\\.global\\.b16|st\\.global\\.v4|st\\.global\\.b16", ptx)
    print(*words)
"""


def test_threads_meet_between_the_load_of_the_targets_logit_and_the_stores_of_the_row():
    """Else a thread may load the exponential that another has stored there: only a device would show it, at times.

    The barrier is the kernel's own: that of the maximum's reduction, which comes before the threads read their
    result from shared memory, is Triton's affair. A second one stands ahead of the zero in the target's column.
    """
    widths = ("512", "8192", "9536", "65536")  # one piece, two, with pieces that are read again, read twice
    for width, line in zip(widths, _run(sys.executable, "-c", SYNCHRONISATION, *widths).splitlines(), strict=True):
        words = line.split()
        target, row = words.index("ld.global.b16"), words.index("st.global.v4")
        zero = len(words) - 1 - words[::-1].index("st.global.b16")
        assert words[target + 1 : row] == ["bar.sync", "ld.shared", "bar.sync"], width
        last_row = len(words) - 1 - words[::-1].index("st.global.v4")
        assert words[last_row + 1 : zero] == ["bar.sync", "ld.shared", "bar.sync"], width


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_kernel_spills_registers(capability):
    lines = _counts("--capabilities", str(capability), "--all")
    assert len(lines) > 150
    assert not [line for line in lines if line.spilt]
