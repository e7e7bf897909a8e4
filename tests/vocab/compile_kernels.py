"""Compile every kernel, as our wrappers launch it, for GPUs that this machine lacks, and count its machine code.

    python -m tests.vocab.compile_kernels [--capabilities 80,90,100] [--all | --few | --capped] [--write | --variants]

The wrappers run on tensors without data, and a launch stops once the machine code exists. Every kernel gives one line
of CSV. Its key is the version of Triton, capability, dtype, width of the row and label smoothing. Its values are warps
per program, registers and spilt bytes per thread, bytes of shared memory, warps per multiprocessor, instructions in the
code, instructions executed per element of a row (only for the softmax), and the widest load and store in bits.
`--write` stores the lines of this version of Triton in tests/vocab/data/kernel_counts.csv, which tests read.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from megatron_vp.vocab.kernels import gradient_rows, rows, softmax
from megatron_vp.vocab.loss import Derivative, GlobalStatistics, TokenLoss
from megatron_vp.vocab.shards import VocabShards
from tests.vocab.machine_code import MachineCode

TABLE = Path(__file__).parent / "data" / "kernel_counts.csv"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

VOCABULARIES = {(151936, 16): 9536, (151936, 32): 4800, (256000, 24): 10688, (262144, 12): 21888, (129280, 6): 21568}
"""Width of a shard by vocabulary and ranks, of numbers of ranks that gave unaligned rows before shards were rounded."""


@dataclass(frozen=True)
class Shape:
    """What is compiled: the width of E and of X, dtypes, and whether labels are smoothed."""

    dtype: torch.dtype = torch.bfloat16
    columns: int = 8192
    hidden: int = 4096
    smoothed: bool = False
    softmax_alone: bool = False
    softcap: float = 0.0
    main_dtype: torch.dtype = torch.float32


def softmax_of(columns: int) -> tuple[object, ...]:
    """What makes the softmax of aligned rows in bf16 another kernel: the launch, a cut last piece, capped registers."""
    launch = softmax.launch_for(columns, torch.bfloat16)
    return launch, softmax._is_full(launch, columns), columns <= softmax.FULLY_OCCUPYING_ROW


def first_widths() -> list[int]:
    """Of 64 to 32,768 columns in steps of 64, the least width that each kernel of the softmax is compiled for.

    With the same kernel a wider row takes fewer instructions per logit.
    """
    found: dict[object, int] = {}
    for columns in range(64, softmax.LARGEST_ROW + 1, 64):
        found.setdefault(softmax_of(columns), columns)
    return sorted(found.values())


COUNTED = [
    *(Shape(columns=columns, softmax_alone=columns != 8192) for columns in (*first_widths(), 65536)),
    *(Shape(columns=VocabShards(*cut).rows(0), softmax_alone=True) for cut in VOCABULARIES),
    *(Shape(dtype, columns, softmax_alone=True) for dtype in DTYPES[1:] for columns in (8192, 16384, 32768, 65536)),
    Shape(smoothed=True, softmax_alone=True),
    Shape(torch.float16),
]
"""Those of the committed table."""

FEW = [shape for shape in COUNTED if not shape.softmax_alone]
"""Of those as many as have every kernel."""

CAPPED = [
    *(Shape(dtype, softcap=30.0) for dtype in DTYPES),
    *(Shape(columns=columns, softmax_alone=True, softcap=30.0) for columns in (512, 9536, 16384, 32768, 65536)),
]
"""With a softcap on the logits. The table has none of them."""

EVERYTHING = [
    Shape(dtype, columns, hidden, smoothed)
    for dtype, columns, hidden, smoothed in product(
        DTYPES,
        [
            *(1, 33, 1500, 9495, 6144, 12352, 16448, 50257, *(2**k for k in range(6, 17))),
            *(VocabShards(*cut).rows(0) for cut in VOCABULARIES),
        ],
        (4096, 1001),
        (False, True),
    )
]


@dataclass(frozen=True)
class Counts:
    """A line of the table."""

    triton: str
    kernel: str
    capability: int
    dtype: str
    width: int
    smoothed: bool
    warps: int
    registers: int
    spilt: int
    shared: int
    warps_per_multiprocessor: int
    instructions: int
    per_element: float | None
    load_bits: int
    store_bits: int

    @property
    def key(self) -> tuple[object, ...]:
        """What was compiled."""
        return astuple(self)[:6]


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
    statistics, target, target_logit = softmax.exponentiate_(exp, token, 64, *weights, softcap=shape.softcap)
    if shape.softmax_alone:
        return
    states, main_grad = empty(tokens, hidden, dtype=dtype), empty(columns, hidden, dtype=shape.main_dtype)
    total = GlobalStatistics(factor, factor, factor)
    terms = Derivative(statistics[0], target, target_logit, total, loss, 2 * columns, shape.softcap)
    softmax.fold_(statistics, empty(shards, 3, tokens))
    gradient_rows.rescale_(states, weight, terms)
    gradient_rows.enter_targets_(exp, states, factor, terms)
    rows.add_rows_(main_grad, token, states)


def counted(shape: Shape, name: str, kernel: CompiledKernel, capability: int) -> Counts:
    """The line of one kernel."""
    code = MachineCode(kernel)
    width = {"_exponentiate": shape.columns, "_fold": 0}.get(name, shape.hidden)
    per_element = None
    if name == "_exponentiate":
        per_element = round(code.instructions_per_element(width, 8 * shape.dtype.itemsize), 1)
    dtype = str(shape.dtype).removeprefix("torch.")
    what = triton.__version__, name, capability, dtype, width, shape.smoothed
    sizes = code.warps, *code.resources, kernel.metadata.shared, code.warps_per_multiprocessor, len(code.instructions)
    return Counts(*what, *sizes, per_element, code.widest("LDG"), code.widest("STG"))


def count(shapes: list[Shape], capability: int) -> Iterator[Counts]:
    """Compile freshly, and count each kernel once; the softmax at every width."""
    listed = set()
    for shape in shapes:
        with compiled_only(capability) as made:
            launch_all(shape)
        for name, kernel in made:
            key = kernel.hash, shape.columns if name == "_exponentiate" else None
            if key not in listed:
                listed.add(key)
                yield counted(shape, name, kernel, capability)


def variants(capability: int) -> Counter[str]:
    """How many kernels each function becomes over numbers that change between microbatches, ranks or jobs.

    Widths are those of one launch of the softmax (`softmax_of`).
    """
    tokens_of, shards_of, first_of = (1, 7, 16, 33, 48, 64), (1, 2, 8, 16, 3, 1), (0, 1, 64, 8191, 16, 640)
    columns_of = (512, 64, 128, 192, 704, 960)
    with compiled_only(capability) as made:
        for tokens, shards, first, columns in zip(tokens_of, shards_of, first_of, columns_of, strict=True):
            token, factor = empty(tokens, dtype=torch.int64), empty(tokens)
            exp, states = empty(tokens, columns, dtype=torch.bfloat16), empty(tokens, 256, dtype=torch.bfloat16)
            statistics, target, target_logit = softmax.exponentiate_(exp, token, first, 1.0)
            softmax.fold_(statistics, empty(shards, 3, tokens))
            total = GlobalStatistics(factor, factor, factor)
            terms = Derivative(statistics[0], target, target_logit, total, TokenLoss(), 1024)
            gradient_rows.rescale_(states, empty(columns, 256, dtype=torch.bfloat16), terms)
            gradient_rows.enter_targets_(exp, states, factor, terms)
            rows.add_rows_(empty(columns, 256), token, states)
    kernels = {(name, kernel.hash) for name, kernel in made}
    return Counter(name for name, _ in kernels)


def read_table() -> list[Counts]:
    """The committed lines."""
    with TABLE.open() as file:
        return [_read(line) for line in csv.DictReader(file)]


def _read(line: dict[str, str]) -> Counts:
    texts = {"triton", "kernel", "dtype"}
    values = {
        name: text if name in texts else text == "True" if name == "smoothed" else float(text) if text else None
        for name, text in line.items()
    }
    return Counts(
        **{name: int(v) if isinstance(v, float) and name != "per_element" else v for name, v in values.items()}
    )


def main() -> None:
    """Compile what is asked for, and print or write its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", default="90")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="all dtypes and widths, also such that do not divide by 16")
    which.add_argument("--few", action="store_true", help="of those of the table as many as have every kernel")
    which.add_argument("--capped", action="store_true", help="with a softcap on the logits")
    parser.add_argument("--write", action="store_true", help="replace this Triton's lines of the committed table")
    parser.add_argument("--variants", action="store_true", help="count the kernels that each function becomes instead")
    args = parser.parse_args()
    shapes = EVERYTHING if args.all else FEW if args.few else CAPPED if args.capped else COUNTED
    names = [field.name for field in fields(Counts)]
    lines = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache))
        if args.variants:
            for name, number in variants(int(args.capabilities)).items():
                print(name, number)
            return
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        for capability in map(int, args.capabilities.split(",")):
            for line in count(shapes, capability):
                writer.writerow(astuple(line))
                sys.stdout.flush()
                lines.append(line)
    if args.write:
        kept = [line for line in (read_table() if TABLE.exists() else []) if line.triton != triton.__version__]
        with TABLE.open("w") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(map(astuple, sorted([*kept, *lines], key=lambda line: line.triton)))


if __name__ == "__main__":
    main()
