"""Compile every kernel, as our wrappers launch it, for a GPU that this machine lacks, and measure its machine code.

    python -m tests.vocab.compile_kernels

The wrappers run on tensors without data, and a launch stops once the machine code exists. The command prints a line of
JSON for each kernel.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from megatron_vp.vocab.kernels import gradient_rows, rows, softmax
from megatron_vp.vocab.loss import Derivative, GlobalStatistics, TokenLoss
from tests.vocab.machine_code import MachineCode


@dataclass(frozen=True)
class Shape:
    """What is compiled: the width of E and of X, dtypes, whether labels are smoothed, what is requested per token."""

    dtype: torch.dtype = torch.bfloat16
    columns: int = 8192
    hidden: int = 4096
    smoothed: bool = False
    softmax_alone: bool = False
    temperature: float = 1.0
    entropy: bool = False


def first_widths() -> list[int]:
    """Of 64 to 32,768 columns in steps of 64, the least width of each launch of the softmax.

    With the same launch a wider row takes fewer instructions per logit.
    """
    found: dict[object, int] = {}
    for columns in range(64, softmax.LARGEST_ROW + 1, 64):
        launch = softmax.launch_for(columns, torch.bfloat16)
        found.setdefault((launch, softmax._is_full(launch, columns), columns <= softmax.FULLY_OCCUPYING_ROW), columns)
    return sorted(found.values())


def shapes() -> Iterator[Shape]:
    """All kernels, and the softmax at every width at which it is another kernel."""
    yield from (Shape(), Shape(smoothed=True, softmax_alone=True), Shape(torch.float16))
    yield from (Shape(columns=columns, softmax_alone=True) for columns in (*first_widths(), 65536))
    yield Shape(temperature=0.7, entropy=True)
    for columns in (8192, 16384, 65536):
        yield from (Shape(columns=columns, softmax_alone=True, temperature=0.7, entropy=each) for each in (False, True))
    for dtype in (torch.float16, torch.float32):
        yield from (Shape(dtype, columns, softmax_alone=True) for columns in (8192, 16384, 32768, 65536))


@contextmanager
def compiled_only(capability: int) -> Iterator[list[tuple[str, CompiledKernel]]]:
    """Inside, launches compile for a device of this compute capability, and are listed."""
    made: list[tuple[str, CompiledKernel]] = []
    launch = JITFunction.run

    def compile_it(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> CompiledKernel:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        made.append((self.__name__, kernel))
        return kernel

    device = SimpleNamespace(
        get_current_device=lambda: capability,  # a number for Triton's cache
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    triton.runtime.driver.set_active(device)
    with mock.patch.object(JITFunction, "run", compile_it):
        yield made


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_all(shape: Shape, tokens: int = 4096, shards: int = 8) -> None:
    """Every wrapper once."""
    dtype, columns, hidden = shape.dtype, shape.columns, shape.hidden
    token, factor, weight = empty(tokens, dtype=torch.int64), empty(tokens), empty(columns, hidden, dtype=dtype)
    loss = TokenLoss(label_smoothing=0.1 if shape.smoothed else 0.0)
    exp = empty(tokens, columns, dtype=dtype)
    weights = loss.target_weight(2 * columns), loss.logit_weight(2 * columns)
    statistics, target, target_logit = softmax.exponentiate_(
        exp, token, 64, *weights, 0.0, shape.temperature, entropy=shape.entropy
    )
    if shape.softmax_alone:
        return
    states, main_grad = empty(tokens, hidden, dtype=dtype), empty(columns, hidden)
    total = GlobalStatistics(factor, factor, factor, factor if shape.entropy else None)
    terms = Derivative(statistics[0], target, target_logit, total, loss, 2 * columns)
    softmax.fold_(statistics, empty(shards, len(statistics), tokens))
    if shape.entropy:
        gradient_rows.enter_derivative_(exp, empty(2, tokens), terms)
    gradient_rows.rescale_(states, weight, terms)
    gradient_rows.enter_targets_(exp, states, factor, terms)
    rows.add_rows_(main_grad, token, states)


def measured(shape: Shape, name: str, kernel: CompiledKernel) -> dict[str, object]:
    """What its machine code takes."""
    code = MachineCode(kernel)
    found = {"kernel": name, "dtype": str(shape.dtype).removeprefix("torch."), "width": shape.columns}
    found |= {"registers": code.resources[0], "spilt": code.resources[1], "smoothed": shape.smoothed}
    found["requested"] = shape.entropy or shape.temperature != 1
    found |= {"load_bits": code.widest("LDG"), "store_bits": code.widest("STG")}
    if name == "_exponentiate":
        found["per_element"] = round(code.instructions_per_element(shape.columns, 8 * shape.dtype.itemsize), 1)
        found["warps_per_multiprocessor"] = code.warps_per_multiprocessor
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for each in shapes():
            with compiled_only(90) as compiled:
                launch_all(each)
            for function, result in compiled:
                print(json.dumps(measured(each, function, result)))
