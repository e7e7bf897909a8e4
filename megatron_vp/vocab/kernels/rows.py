"""Triton kernels that add up, in pass IB, the rows of the embedding's gradient that belong to the same word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""A program handles this many elements of one row at a time."""

SEGMENT = 32
"""Number of sorted row indices in a segment. One program adds up at most one segment. If an index occurs in several
segments, another program adds up the partial sums.
"""


# A new value of `count` must not trigger a compilation.
@triton.jit(do_not_specialize=["count"])
def _add_segments(
    matrix, row, order, source, partial, count, hidden,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    place, part = tl.program_id(0), tl.program_id(1)
    own = tl.load(row + place)
    before = tl.load(row + place - 1, mask=place > 0, other=-1)
    first_of_segment = place % SEGMENT == 0
    # One program adds, in order, all sources in a segment that have the same row index.
    if ((own != before) | first_of_segment) & (own >= 0):
        lane = part * BLOCK + tl.arange(0, BLOCK)
        inside = lane < hidden
        segment = place // SEGMENT
        end = tl.minimum((segment + 1) * SEGMENT, count)
        total = tl.zeros((BLOCK,), tl.float32)
        following = own
        while following == own:
            token = place.to(tl.int64) if IN_ORDER else tl.load(order + place)
            total += tl.load(source + token * hidden + lane, mask=inside, other=0.0).to(tl.float32)
            place += 1
            following = tl.load(row + place, mask=place < end, other=-1)
        goes_on = tl.load(row + place, mask=place < count, other=-1) == own
        if goes_on | (own == before):
            slot = 2 * segment + tl.where(first_of_segment, 0, 1)
            tl.store(partial + slot.to(tl.int64) * hidden + lane, total, mask=inside)
        else:
            address = matrix + own * hidden + lane
            total += tl.load(address, mask=inside, other=0.0).to(tl.float32)
            tl.store(address, total.to(matrix.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add_partial_sums(matrix, row, partial, count, hidden, BLOCK: tl.constexpr, SEGMENT: tl.constexpr):
    segment, part = tl.program_id(0), tl.program_id(1)
    first, after = segment * SEGMENT, (segment + 1) * SEGMENT
    own = tl.load(row + after - 1, mask=after < count, other=-1)
    fills = tl.load(row + first) == own
    comes_in = fills & (tl.load(row + first - 1, mask=first > 0, other=-1) == own)
    # If a row index occurs in several segments, the program of the first one adds up the index's partial sums.
    if (own >= 0) & (comes_in == 0):
        end = segment + 1
        while tl.load(row + end * SEGMENT, mask=end * SEGMENT < count, other=-1) == own:
            end += 1
        if end > segment + 1:
            lane = part * BLOCK + tl.arange(0, BLOCK)
            inside = lane < hidden
            address = matrix + own * hidden + lane
            total = tl.load(address, mask=inside, other=0.0).to(tl.float32)
            for each in range(segment, end):
                slot = 2 * each + tl.where((each == segment) & (fills == 0), 1, 0)
                total += tl.load(partial + slot.to(tl.int64) * hidden + lane, mask=inside, other=0.0)
            tl.store(address, total.to(matrix.dtype.element_ty), mask=inside)


def add_rows_(
    matrix_vh: torch.Tensor, row_n: torch.Tensor, source_nh: torch.Tensor, *, sorted_rows: bool = False
) -> None:
    """Compute matrix[row_i] += source_i with sums in fp32; see `EagerOperations.add_rows_`. Matrices are contiguous.

    Row indices are sorted, then divided into segments. One program adds up the sources that have the same index within
    a segment. If an index occurs in several segments, another program adds up the partial sums. So even if all n
    indices are equal (padding, for example), each program adds at most the sources of one segment, or one partial sum
    from each segment. No atomics are needed.
    """
    count, hidden = source_nh.shape
    assert matrix_vh.is_contiguous() and source_nh.is_contiguous()
    if not count:
        return
    # If the row indices are already sorted, the kernel does not read `order`.
    sorted_n, order_n = (row_n, row_n) if sorted_rows else row_n.sort(stable=True)
    segments, parts = triton.cdiv(count, SEGMENT), triton.cdiv(hidden, BLOCK)
    # Each segment has two partial sums: one for its first row index, which may continue from the previous segment, and
    # one for its last row index, which may continue into the next.
    partial = torch.empty(2 * segments, hidden, dtype=torch.float32, device=source_nh.device)
    _add_segments[(count, parts)](
        matrix_vh, sorted_n, order_n, source_nh, partial, count, hidden,
        BLOCK=BLOCK,
        SEGMENT=SEGMENT,
        IN_ORDER=sorted_rows,
        enable_fp_fusion=True,
    )  # fmt: skip
    _add_partial_sums[(segments, parts)](
        matrix_vh, sorted_n, partial, count, hidden, BLOCK=BLOCK, SEGMENT=SEGMENT, enable_fp_fusion=True
    )
