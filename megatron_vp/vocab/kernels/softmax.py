"""S after its GEMM, in one pass over the logits: targets and statistics out, E in place. Statistics of C1 (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_ROW = 16384
"""Logits of one token that a program keeps in registers; longer rows are read twice, the second time from L2. With
twice as many, what 1024 threads hold of them spills (compiled for capability 9.0; not yet timed)."""

LOGITS_A_THREAD = 16
"""Registers then suffice for 32 warps on a multiprocessor at every length of a row."""


TOKENS_A_PROGRAM = 128
"""When statistics are folded."""


@triton.jit(do_not_specialize=["first", "tokens"])
def _exponentiate(
    logits, stride, labels, first, target_weight, statistics, target, target_logit, tokens, columns,
    BLOCK: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    # V x n passes 2^31: the row's address is the one place where 32 bits would not do.
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    local = tl.load(labels + token) - first
    own = tl.where((local >= 0) & (local < columns), local, -1)
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
    tl.store(statistics + 2 * tokens + token, picked * target_weight)
    tl.store(target + token, own)
    tl.store(target_logit + token, picked)


def exponentiate_(
    logits_nv: torch.Tensor, labels_n: torch.Tensor, first: int, target_weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace logits by E = exp(logit - row maximum), the target's column by zero; `Operations.exponentiate_`.

    Everything is computed in fp32 from the logits as they are; E is rounded once, to the logits' dtype. The sums run in
    a fixed order: two runs give the same bits.

    Args:
        logits_nv: [n, V/p] in fp32, bf16 or fp16, rows contiguous; V/p >= 1. Overwritten.
        labels_n: global token ids, int64 [n].
        first: the token of column 0.
        target_weight: t, what the target's logit counts in the loss.

    Returns:
        Statistics a, l and t z, fp32 [3, n]; the target's column, int64 [n], -1 where it belongs to another shard; z,
        fp32 [n], 0 there.
    """
    tokens, columns = logits_nv.shape
    assert logits_nv.stride(1) == 1 and columns
    labels_n = labels_n.contiguous()
    statistics_3n = torch.empty(3, tokens, dtype=torch.float32, device=logits_nv.device)
    target_n, target_logit_n = torch.empty_like(labels_n), torch.empty_like(statistics_3n[0])
    whole = columns <= LARGEST_ROW
    block = triton.next_power_of_2(columns) if whole else 4096
    _exponentiate[(tokens,)](
        logits_nv, logits_nv.stride(0), labels_n, first, target_weight, statistics_3n, target_n, target_logit_n,
        tokens, columns,
        BLOCK=block,
        WHOLE_ROW=whole,
        num_warps=min(max(block // (32 * LOGITS_A_THREAD), 4), 32),
        enable_fp_fusion=True,
    )  # fmt: skip
    return statistics_3n, target_n, target_logit_n


@triton.jit(do_not_specialize=["shards", "tokens"])
def _fold(total, gathered, shards, tokens, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    size = 3 * tokens.to(tl.int64)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for shard in range(shards):
        own = tl.load(gathered + shard * size + token, mask=inside, other=-float("inf"))
        largest = tl.maximum(largest, own)
    finite = tl.maximum(largest, -3.4e38)  # the difference of two infinities is no number
    sum_of_all = tl.zeros((BLOCK,), tl.float32)
    linear_of_all = tl.zeros((BLOCK,), tl.float32)
    for shard in range(shards):
        row = gathered + shard * size + token
        own = tl.load(row, mask=inside, other=-float("inf"))
        sum_of_all += tl.load(row + tokens, mask=inside, other=0.0) * tl.exp(own - finite)
        linear_of_all += tl.load(row + 2 * tokens, mask=inside, other=0.0)
    tl.store(total + token, largest, mask=inside)
    tl.store(total + tokens + token, sum_of_all, mask=inside)
    tl.store(total + 2 * tokens + token, linear_of_all, mask=inside)


def fold_(total_3n: torch.Tensor, gathered_r3n: torch.Tensor) -> None:
    """Fold the packed statistics of some shards, in their order, into those of all together; `Operations.fold_`.

    Args:
        total_3n: fp32 [3, n], contiguous. Overwritten.
        gathered_r3n: fp32 [shards, 3, n], contiguous.
    """
    shards, _, tokens = gathered_r3n.shape
    assert total_3n.is_contiguous() and gathered_r3n.is_contiguous()
    grid = (triton.cdiv(tokens, TOKENS_A_PROGRAM),)
    _fold[grid](total_3n, gathered_r3n, shards, tokens, BLOCK=TOKENS_A_PROGRAM, enable_fp_fusion=True)
