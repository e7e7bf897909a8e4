"""The part of S after its GEMM, in one pass over the logits: statistics out, E in place (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_ROW = 16384
"""Logits of one token that a program keeps in registers; longer rows are read twice, the second time from L2. With
twice as many, what 1024 threads hold of them spills (compiled for capability 9.0; not yet timed)."""

LOGITS_A_THREAD = 16
"""Registers then suffice for 32 warps on a multiprocessor at every length of a row."""


@triton.jit
def _exponentiate(logits, stride, target, statistics, tokens, columns, BLOCK: tl.constexpr, WHOLE_ROW: tl.constexpr):
    # V x n passes 2^31: the row's address is the one place where 32 bits would not do.
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    own = tl.load(target + token)
    if WHOLE_ROW:
        logit = tl.load(row + lane, mask=lane < columns, other=-float("inf")).to(tl.float32)
        largest = tl.max(logit, 0)
        exp = tl.exp(logit - largest)
        total = tl.sum(exp, 0)
        picked = tl.sum(tl.where(lane == own, logit, 0.0), 0)
        kept = tl.where(lane == own, 0.0, exp)
        tl.store(row + lane, kept.to(logits.dtype.element_ty), mask=lane < columns)
    else:
        # Each lane keeps a maximum and a sum of its own; they meet once, at the end.
        largest_lane = tl.full((BLOCK,), -float("inf"), tl.float32)
        total_lane = tl.zeros((BLOCK,), tl.float32)
        picked_lane = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            here = start + lane
            logit = tl.load(row + here, mask=here < columns, other=-float("inf")).to(tl.float32)
            larger = tl.maximum(largest_lane, logit)
            # A lane that has met no column yet would make -inf - -inf.
            shrink = tl.where(largest_lane == -float("inf"), 0.0, tl.exp(largest_lane - larger))
            grown = tl.where(logit == -float("inf"), 0.0, tl.exp(logit - larger))
            total_lane = total_lane * shrink + grown
            largest_lane = larger
            picked_lane += tl.where(here == own, logit, 0.0)
        largest = tl.max(largest_lane, 0)
        shrink = tl.where(largest_lane == -float("inf"), 0.0, tl.exp(largest_lane - largest))
        total = tl.sum(total_lane * shrink, 0)
        picked = tl.sum(picked_lane, 0)
        for start in range(0, columns, BLOCK):
            here = start + lane
            logit = tl.load(row + here, mask=here < columns, other=-float("inf")).to(tl.float32)
            kept = tl.where(here == own, 0.0, tl.exp(logit - largest))
            tl.store(row + here, kept.to(logits.dtype.element_ty), mask=here < columns)
    tl.store(statistics + token, largest)
    tl.store(statistics + tokens + token, total)
    tl.store(statistics + 2 * tokens + token, picked)


def exponentiate_(logits_nv: torch.Tensor, target_n: torch.Tensor, statistics_3n: torch.Tensor) -> None:
    """Replace logits by E = exp(logit - row maximum), the target's column by zero; fill the packed statistics.

    Everything is computed in fp32 from the logits as they are; E is rounded once, to the logits' dtype. The sums run in
    a fixed order: two runs give the same bits.

    Args:
        logits_nv: [n, V/p] in fp32, bf16 or fp16, rows contiguous; V/p >= 1. Overwritten.
        target_n: int64 [n], the column of the target, -1 where it belongs to another shard.
        statistics_3n: fp32 [3, n], contiguous; overwritten with maximum, sum, target's logit (0 without a target).
    """
    tokens, columns = logits_nv.shape
    assert logits_nv.stride(1) == 1 and statistics_3n.is_contiguous() and columns
    whole = columns <= LARGEST_ROW
    block = triton.next_power_of_2(columns) if whole else 4096
    _exponentiate[(tokens,)](
        logits_nv,
        logits_nv.stride(0),
        target_n,
        statistics_3n,
        tokens,
        columns,
        BLOCK=block,
        WHOLE_ROW=whole,
        num_warps=min(max(block // (32 * LOGITS_A_THREAD), 4), 32),
    )
