"""Counts the bytes that fp8 and fp4 recipes move and keep in transformer layers. None of these counts was measured.

The matrix products of a layer (queries, keys and values; output projection; both products of the MLP) read fp8 operands
and write 16-bit results. Norms, attention, routers, vocabulary layers, gradient buffers and the optimizer do not use
fp8.

    F   quantises X for X W^T and, in columns, for the weight gradient; quantises the weights once per iteration
    B   quantises dY for dY W and, in columns, for the weight gradient
    W   computes dY^T X from the tensors that F and B have quantised

With one scale per tensor, "in columns" means the transpose, which is needed on GPUs whose tensor cores multiply fp8 in
only one layout. With one scale per block, "in columns" means that the tensor is quantised again, in blocks along its
columns.

With sequence parallelism, Transformer Engine quantises a tensor before it gathers it: every rank quantises its own
tokens, and the gather moves narrow elements. A transpose follows the gather.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_vp.cost.hardware.gpus import HARDWARE, Hardware
from megatron_vp.cost.layers.layer_operations import Op, operations
from megatron_vp.cost.layers.shapes import Fp8Recipe, Job
from megatron_vp.errors import UserError


class Quantised(NamedTuple):
    """Bytes per element to quantise a tensor: bytes read, and bytes written for its row-wise and column-wise copies."""

    read: float
    rows: float
    columns: float

    @property
    def kept(self) -> float:
        """Bytes kept per element of a weight: its row-wise copy for F and its column-wise copy for B."""
        return self.rows + self.columns

    @property
    def moved(self) -> float:
        """Bytes read and written per element."""
        return self.read + self.kept


_SCALES = {Fp8Recipe.BLOCKWISE: 4 / 128, Fp8Recipe.MXFP8: 1 / 32, Fp8Recipe.NVFP4: 1 / 16}
"""Bytes of scales per element: one fp32 scale for 128 elements, or one 8-bit scale for 32 or 16."""


def quantised(recipe: Fp8Recipe, hardware: Hardware) -> Quantised:
    """Bytes per element that quantising a tensor with `recipe` reads and writes on `hardware`.

    `tensorwise` and `nvfp4` read a tensor twice: to find its maximum, and to scale it.
    """
    read = 4.0 if recipe in (Fp8Recipe.TENSORWISE, Fp8Recipe.NVFP4) else 2.0
    if recipe in _SCALES:
        return Quantised(read, *[element_bytes(recipe) + _SCALES[recipe]] * 2)
    return Quantised(read, 1.0, 0.0 if hardware.rates and hardware.rates.any_layout_fp8 else 1.0)


FUSED = ("qkv", "in", "up")
"""Products that Transformer Engine fuses with the norm before them, outside experts. With delayed scaling, the norm
writes its result in fp8, one byte less per element, so that only the transpose remains of the cast.
"""


def cast_bytes(job: Job, op: Op, hardware: Hardware) -> tuple[float, float]:
    """Bytes moved to quantise the input of a product in F, and the gradient of its result in B."""
    assert job.fp8 and op.matrix
    cast, matrix = quantised(job.fp8, hardware), op.matrix
    parts, shared = job.tensor if job.sequence_parallel else 1, cast.moved
    if parts > 1:
        transposed = job.fp8 not in _SCALES
        shared = (cast.read + cast.rows) / parts + 2 * cast.columns if transposed else cast.moved / parts
    forward = backward = cast.moved
    if op.waits == "tensor":
        backward = shared
    elif job.fp8 is Fp8Recipe.DELAYED and op.name in FUSED and not op.expert:
        forward = 2 * cast.columns - 1 / parts
    elif not op.expert and matrix.tokens == job.tokens:
        forward = shared
    each = matrix.tokens * matrix.copies
    return forward * each * matrix.inputs, backward * each * matrix.outputs


def gathered_share(job: Job, op: Op) -> float:
    """Bytes of a sum over tensor ranks, relative to those in 16 bits: its gather, one half, moves narrow elements."""
    if job.fp8 is None or not op.narrows or not job.sequence_parallel:
        return 1.0
    return 0.5 + 0.5 * element_bytes(job.fp8) / job.element_bytes


def element_bytes(recipe: Fp8Recipe) -> float:
    """Bytes of a narrow element, without its share of a scale."""
    return 0.5 if recipe is Fp8Recipe.NVFP4 else 1.0


def rate_of(recipe: Fp8Recipe, hardware: Hardware) -> float:
    """FLOP/s of large matrix products with `recipe`; 0 if the hardware does not support it or its rates are unknown."""
    if hardware.rates is None:
        return 0.0
    return hardware.rates.fp4_gemm if recipe is Fp8Recipe.NVFP4 else hardware.rates.fp8_gemm


def refuse_fp8(job: Job, hardware: Hardware) -> None:
    """Raise UserError if `hardware` cannot run the job's fp8 recipe, or if the fp8 rates of `hardware` are unknown."""
    if job.fp8 is None:
        return
    if not rate_of(job.fp8, hardware):
        known = ", ".join(name for name, entry in HARDWARE.items() if rate_of(job.fp8, entry))
        kind = "fp4" if job.fp8 is Fp8Recipe.NVFP4 else "fp8"
        raise UserError(f"no {kind} rates are known for --hardware {hardware.name}; use one of {known}")
    if job.fp8 is Fp8Recipe.MXFP8 and not (hardware.rates and hardware.rates.any_layout_fp8):
        raise UserError(
            f"--fp8-recipe mxfp8 does not run on {hardware.name}, whose tensor cores cannot scale blocks of 32 "
            "elements: use another recipe, or --hardware b200"
        )


def fp8_weights(job: Job, kind: str = "t") -> int:
    """Parameters of one layer on one rank that fp8 recipes multiply in fp8."""
    return sum(op.matrix.weights for op in operations(job, kind) if op.matrix and op.narrows)
