"""Test the machine code of the kernels, compiled for absent GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from megatron_vp.cost.ranks.vocab_kernels import (  # noqa: E402
    LONG_ROW_INSTRUCTIONS,
    LONGEST_ROW,
    WHOLE_ROW_INSTRUCTIONS,
)


def _run(*command: str) -> str:
    """What the interpreter accepts, the compiler may not: down to machine code it needs no GPU, but no interpreter."""
    if not os.access(triton.knobs.nvidia.ptxas.path, os.X_OK):
        pytest.skip("this Triton comes without ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_no_kernel_spills_registers_and_the_softmax_takes_the_instructions_of_the_cost_model():
    """Run it after a change of the kernels or of Triton."""
    lines = [json.loads(line) for line in _run(sys.executable, "-m", "tests.vocab.compile_kernels").splitlines()]
    assert len({line["kernel"] for line in lines}) >= 6 and not [line for line in lines if line["spilt"]]
    unchanged = [line for line in lines if not line["smoothed"] and not line["requested"]]
    softmax = [line for line in unchanged if line["kernel"] == "_exponentiate"]
    most = {True: 0.0, False: 0.0}
    for line in softmax:
        assert (line["load_bits"], line["store_bits"]) == (128, 128), line
        assert line["width"] > 16384 or line["warps_per_multiprocessor"] == 64, line
        if line["dtype"] == "bfloat16" and line["width"] % 4096 == 0:  # other widths issue a mask as well
            whole = line["width"] <= LONGEST_ROW
            most[whole] = max(most[whole], line["per_element"])
    assert 0.9 * WHOLE_ROW_INSTRUCTIONS < most[True] <= WHOLE_ROW_INSTRUCTIONS
    assert 0.75 * LONG_ROW_INSTRUCTIONS < most[False] <= LONG_ROW_INSTRUCTIONS


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
