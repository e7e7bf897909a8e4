"""Compile every kernel as our wrappers launch it, for GPUs that are not there: dtypes, specialisations, block sizes.

    python -m tests.vocab.compile_kernels [--capabilities 80,90,100] [--all]

The wrappers run on tensors without data, and a launch ends with the machine code. A line for each: kernel, capability,
warps, registers a thread, bytes of registers spilt to memory, bytes of shared memory, and what was compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from megatron_vp.vocab.derivative import Derivative
from megatron_vp.vocab.kernels import derivative, rows, softmax
from megatron_vp.vocab.loss import CROSS_ENTROPY
from megatron_vp.vocab.statistics import GlobalStatistics

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


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


def launch_all(dtype: torch.dtype, columns: int, hidden: int, tokens: int, main_dtype: torch.dtype) -> None:
    """Every wrapper once."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    token, factor, weight = empty(tokens, dtype=torch.int64), empty(tokens), empty(columns, hidden, dtype=dtype)
    states, main_grad = empty(tokens, hidden, dtype=dtype), empty(columns, hidden, dtype=main_dtype)
    exp = empty(tokens, columns, dtype=dtype)
    statistics, target, target_logit = softmax.exponentiate_(exp, token, 64, 1.0)
    total = GlobalStatistics(factor, factor, factor)
    terms = Derivative(statistics[0], target, target_logit, total, CROSS_ENTROPY, 2 * columns)
    softmax.fold_(statistics, empty(8, 3, tokens))
    derivative.rescale_(states, weight, terms)
    derivative.enter_targets_(exp, states, factor, terms)
    rows.add_rows_(main_grad, token, states)


def resources(kernel: CompiledKernel) -> tuple[int, int]:
    """Registers a thread and bytes spilt by it, as its machine code says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return int(numbers[1]), int(numbers[2])


def main() -> None:
    """Compile what is asked for, freshly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", default="80,90,100")
    parser.add_argument(
        "--all", action="store_true", help="all dtypes, every block size, sizes that do not divide by 16"
    )
    args = parser.parse_args()
    launches = [(torch.bfloat16, 16384, 4096, 4096, torch.float32), (torch.bfloat16, 64128, 5120, 4096, torch.bfloat16)]
    if args.all:
        widths = [1, 33, *(2**k for k in range(6, 16)), 50257]
        launches = [
            (dtype, columns, hidden, 4096, torch.float32)
            for dtype, columns, hidden in product((torch.float32, *SIXTEEN_BIT), widths, (4096, 1001))
        ]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache))
        for capability in map(int, args.capabilities.split(",")):
            listed = set()
            with compiled_only(capability) as made:
                for launch in launches:
                    launch_all(*launch)
            for name, kernel in made:
                if kernel.hash not in listed:
                    listed.add(kernel.hash)
                    registers, spilt = resources(kernel)
                    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
                    constants = {
                        kernel.src.fn.arg_names[place[0]]: value for place, value in kernel.src.constants.items()
                    }
                    types = ",".join(each for each in kernel.src.signature.values() if each != "constexpr")
                    print(name, capability, warps, registers, spilt, shared, types, constants, flush=True)


if __name__ == "__main__":
    main()
