"""Other ways to launch the softmax of S, and a softmax of blocks that stay in L2 (`benchmarks/candidates.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from megatron_vp.vocab.kernels.softmax import LOG2_E, Launch, launch_for

RANGE = 60.0
"""How far a logit may exceed its row's reference, so that its exponential, and sums of 2^30 of these, fit bf16 and
fp32.
"""


def launches(columns: int, dtype: torch.dtype) -> dict[str, Launch]:
    """The launches by name, first that of the package."""
    usual = launch_for(columns, dtype)
    found = {"kernels": usual}
    if 0 < usual.pieces <= 2 and usual.warps > 4:
        half, warps = usual.piece // 2, usual.warps // 2
        found["half the warps"] = Launch(triton.cdiv(columns, half), half, warps)
        if dtype == torch.bfloat16 and columns > 3 * half:
            found["half the warps, three held"] = Launch(triton.cdiv(columns, half), half, warps, held=3)
    if usual.held < usual.pieces:
        found["all pieces held"] = replace(usual, held=usual.pieces)
        found["twice the warps"] = Launch(triton.cdiv(columns, 2 * usual.piece), 2 * usual.piece, 2 * usual.warps)
    if columns > 16384:
        found["two reads 4096 x 8"] = Launch(0, 4096, 8)
        found["two reads 2048 x 4"] = Launch(0, 2048, 4)
    return found


@triton.jit
def _exponentiate_block(
    logits, stride, target, reference, total, picked, start, columns, RANGE,
    BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    inside = lane < columns
    own = tl.load(target + token).to(tl.int32)
    mine = (own >= start) & (own < start + columns)
    target_logit = tl.load(row + own, mask=mine, other=0.0).to(tl.float32)
    logit = tl.load(row + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
    largest = tl.max(logit, 0)
    if FIRST:
        base, before = largest, 0.0
    else:
        base, before = tl.load(reference + token), tl.load(total + token)
        if largest - base > RANGE:
            # Rarely needed: rescale the earlier blocks of this row to the new reference.
            shrink = tl.exp(base - largest)
            for earlier in range(0, start, BLOCK):
                place = earlier + lane
                held = tl.load(row + place, mask=place < start, other=0.0).to(tl.float32)
                tl.store(row + place, (held * shrink).to(logits.dtype.element_ty), mask=place < start)
            before *= shrink
            base = largest
    exp = tl.exp2((logit - base) * LOG2_E)
    tl.debug_barrier()
    tl.store(row + start + lane, exp.to(logits.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    tl.store(row + own, 0.0, mask=mine)
    tl.store(picked + token, target_logit, mask=mine)
    tl.store(reference + token, base)
    tl.store(total + token, before + tl.sum(exp, 0))


def exponentiate_block(
    exp_nv: torch.Tensor, target_n: torch.Tensor, statistics_3n: torch.Tensor, start: int, columns: int
) -> None:
    """Turn columns of logits into exp(logit - r), with one reference r per row: the first block's maximum.

    Call it for blocks in the order of their columns, the first with `start` 0. bf16 has the exponents of fp32, so E is
    equally precise for any r near the maximum. It does not work for fp16.

    Args:
        exp_nv: logits from column `start` on, E before it; rows are contiguous.
        target_n: the column of the target, -1 if it is on another shard.
        statistics_3n: r, the sum of exp(logit - r) so far, and the target's logit, initially zero; rows are contiguous.
            Updated in place.
        start, columns: the first column of the block, and their number.
    """
    block = triton.next_power_of_2(columns)
    _exponentiate_block[(len(exp_nv),)](
        exp_nv, exp_nv.stride(0), target_n, *statistics_3n, start, columns, RANGE,
        BLOCK=block,
        FIRST=start == 0,
        num_warps=min(max(block // 512, 4), 32),
        enable_fp_fusion=True,
    )  # fmt: skip
