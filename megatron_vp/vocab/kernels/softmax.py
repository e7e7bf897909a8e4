"""Triton kernels for the part of S after the GEMM (statistics, targets and E) and for combining the shards' statistics.

A fast GPU needs about as long to move four bytes per logit (a 16-bit load and store) as to issue 20 instructions per
logit, so both memory traffic and instruction counts matter. The kernels use one load, one store and one exponential per
logit. For rows of up to `FULLY_OCCUPYING_ROW` logits, they use few enough registers for a multiprocessor to run 64
warps. For some row lengths, up to two fifths of the logits are loaded again, from L1. Rows longer than `LARGEST_ROW`
are loaded twice. `tests/vocab/test_compiled.py` holds instructions and registers to these limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LARGEST_ROW = 32768
"""Length in logits of the longest row that one program holds in registers. A longer row is read twice, the second time
from L2.
"""

LONG_ROW_BLOCK = 4096
"""Number of logits that a program handles at a time in rows longer than `LARGEST_ROW`."""

FULLY_OCCUPYING_ROW = 16384
"""Length of the longest rows whose programs fit in 32 registers per thread, so that a multiprocessor runs 64 warps."""

CAPPED_PIECES = {torch.bfloat16: 3, torch.float16: 2, torch.float32: 2}
"""Largest number of pieces (see `Launch`) that fit in 32 registers per thread. In fp16, three pieces spill at compute
capability 10.0.
"""

VECTOR = 8
"""Number of 16-bit logits in a 16-byte access. Widths and strides that are multiples of VECTOR are passed to the kernel
in units of VECTOR, which tells the compiler that accesses are aligned.
"""

TOKENS_A_PROGRAM = 128
"""Number of tokens per program in the kernel that combines the shards' statistics."""

LOG2_E = tl.constexpr(1.4426950408889634)

LOWEST = tl.constexpr(-1200.0)
"""Exponent whose power of two is zero in fp32; it replaces -inf, whose product with zero would be NaN."""


@dataclass(frozen=True)
class Launch:
    """How rows of one width are assigned to programs.

    pieces, piece: a program handles its row as one to five pieces of `piece` logits. With 0 pieces, the program reads
        the row twice, `piece` logits at a time.
    held: how many of the pieces stay in registers. The program reads the other pieces a second time, from L1.
    warps: number of warps per program.
    """

    pieces: int
    piece: int
    warps: int
    held: int = 4


def launch_for(columns: int, dtype: torch.dtype) -> Launch:
    """Choose the launch settings for rows of `columns` logits.

    In a piece, every thread handles one vector. The number of threads in a program is a power of two, so most widths
    leave lanes of the last piece idle. In bf16, if two or three pieces would leave many lanes idle, the launch uses
    half the warps and up to five pieces. At most three pieces fit in 32 registers, so the other pieces are read again.
    """
    if columns > LARGEST_ROW:
        return Launch(pieces=0, piece=LONG_ROW_BLOCK, warps=8)
    pieces = 3 if dtype.itemsize == 2 else 2
    warps = _warps(columns, pieces)
    piece = warps * 32 * VECTOR
    used = columns / piece
    if dtype == torch.bfloat16 and warps > 4 and (used < 2 or 2 < used < 2.5):
        return Launch(triton.cdiv(2 * columns, piece), piece // 2, warps // 2, held=3)
    return Launch(triton.cdiv(columns, piece), piece, warps)


def _warps(columns: int, pieces: int) -> int:
    """Return the smallest number of warps, from 4 to 32, with which no thread handles more than `pieces` vectors."""
    return min(max(triton.next_power_of_2(triton.cdiv(columns, pieces * 32 * VECTOR)), 4), 32)


@triton.jit
def _load(row, lane, start, columns, MASKED: tl.constexpr):
    """Load logits from column `start` on; `row + lane` is computed once, so a constant start needs no register."""
    if MASKED:
        return tl.load((row + lane) + start, mask=lane < columns - start, other=-float("inf"))
    else:
        return tl.load((row + lane) + start)


@triton.jit
def _comparable(logit, PIECES: tl.constexpr):
    """Return the logits in the dtype in which their maximum is computed."""
    if PIECES > 2 and logit.dtype == tl.float16:
        return logit
    else:
        return logit.to(tl.float32)


@triton.jit
def _widened(logit, PIECES: tl.constexpr):
    """Return the logits in fp32. For bf16 rows of more than two pieces, the conversion is a bit shift. If both this
    function and `_comparable` called `to`, the compiler would convert only once and keep the result, which takes twice
    the registers.
    """
    if PIECES > 2 and logit.dtype == tl.bfloat16:
        return (logit.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return logit.to(tl.float32)


@triton.jit
def _addend(logit, lane, start, columns, MASKED: tl.constexpr):
    """Return the logits in fp32, with zeros beyond the row's end."""
    wide = logit.to(tl.float32)
    if MASKED:
        return tl.where(lane < columns - start, wide, 0.0)
    else:
        return wide


@triton.jit
def _capped(logit, softcap):
    """Return softcap * tanh(logit / softcap) with an error below 1e-6 * softcap. The logit is returned unchanged if
    there is no softcap, or if the logit is -inf. Beyond the row's end, `_load` returns -inf.
    """
    if softcap is None:
        return logit
    else:
        ratio = logit * (1.0 / softcap)
        square = ratio * ratio
        # Near zero, the subtraction in `far` would suffer from cancellation.
        near = ratio * (1.0 + square * (square * (2.0 / 15.0) - 1.0 / 3.0))
        far = 1.0 - 2.0 / (tl.exp2(ratio * (2.0 * LOG2_E)) + 1.0)
        return tl.where(logit == -float("inf"), logit, softcap * tl.where(square < 0.0225, near, far))


@triton.jit
def _kept(exp, logit, softcap):
    """Return the value that is stored: `exp`, multiplied by the softcap's slope if there is one. `logit` is capped."""
    if softcap is None:
        return exp
    else:
        ratio = logit * (1.0 / softcap)
        return exp * (1.0 - ratio * ratio)


@triton.jit
def _replace(
    row, lane, start, logit, largest, columns, softcap, slope, scale, PIECES: tl.constexpr, MASKED: tl.constexpr
):
    """Overwrite logits with exp(logit - largest), times a softcap's slope. Return the exponential alone, in fp32, and
    its product with the exponent to base 2, whose computation is dropped if it is not used.
    """
    # The exponent is not computed as fma(logit, log2 e, -largest log2 e): with logits near -1000, the product of
    # `largest` and log2 e has a rounding error of 3e-5.
    wide = _capped(_widened(logit, PIECES), softcap)
    below = (wide - largest) * scale
    exp = tl.exp2(below)
    kept = _kept(exp, wide, slope).to(logit.dtype)
    if MASKED:
        tl.store((row + lane) + start, kept, mask=lane < columns - start)
    else:
        tl.store((row + lane) + start, kept)
    return exp, exp * tl.maximum(below, LOWEST)


@triton.jit(do_not_specialize=["stride", "first", "tokens", "columns"])
def _exponentiate(
    logits, stride, labels, first, target_weight, logit_weight, softcap, slope, temperature, statistics, target, tokens,
    columns,
    PIECES: tl.constexpr, PIECE: tl.constexpr, HELD: tl.constexpr, FULL: tl.constexpr, UNIT: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    columns = columns * UNIT
    # A matrix of logits can have more than 2^31 entries, so the row's offset needs 64 bits. Offsets within the row fit
    # in 32 bits.
    row = logits + token.to(tl.int64) * stride * UNIT
    lane = tl.arange(0, PIECE)
    local = tl.load(labels + token) - first
    # An id outside the shard becomes -1. Only then is the id narrowed to 32 bits, so that a large id cannot wrap around
    # into the shard.
    own = tl.where(local.to(tl.uint64, bitcast=True) < columns.to(tl.uint64), local, -1).to(tl.int32)
    picked = _capped(tl.load(row + own, mask=own >= 0, other=0.0).to(tl.float32), softcap)
    scale = LOG2_E if temperature is None else LOG2_E / temperature
    if PIECES > 0:
        # 1. Load the row and compute its maximum. Capping keeps the order of logits, so only their maximum needs to be
        # capped here. Pieces that are not held in registers are loaded first. All pieces but the last are full.
        held = ()  # type: tuple
        for part in tl.static_range(2):
            for i in tl.static_range((1 - part) * HELD, part * HELD + (1 - part) * PIECES):
                logit = _load(row, lane, i * PIECE, columns, i == PIECES - 1 and not FULL)
                if i == HELD % PIECES:  # This piece is loaded first.
                    compared = _comparable(logit, PIECES)
                else:
                    compared = tl.maximum(compared, _comparable(logit, PIECES))
                if SMOOTHED:
                    if i == HELD % PIECES:
                        added = _addend(logit, lane, i * PIECE, columns, i == PIECES - 1 and not FULL)
                    else:
                        added += _addend(logit, lane, i * PIECE, columns, i == PIECES - 1 and not FULL)
                if i < HELD:
                    held = held + (logit,)  # noqa: RUF005  (Triton has no unpacking)
        largest = _capped(tl.max(compared.to(tl.float32), 0), softcap)
        if SMOOTHED:
            sum_of_logits = tl.sum(added, 0)
        # 2. Store the exponentials, and add them up before rounding. The barrier below makes sure that every thread
        # reads the target's logit before it is overwritten.
        if PIECES > HELD:
            # The target's logit is loaded again below, because no register is free to keep it.
            tl.store(statistics + (3 * tokens + token), picked)
        tl.debug_barrier()
        for i in tl.static_range(PIECES):
            if i < HELD:
                logit = held[i]
            else:
                if i == HELD:
                    # Keep the compiler from loading these pieces while registers still hold the others.
                    tl.debug_barrier()
                logit = _load(row, lane, i * PIECE, columns, i == PIECES - 1 and not FULL)
            exp, tilted = _replace(
                row, lane, i * PIECE, logit, largest, columns, softcap, slope, scale, PIECES,
                i == PIECES - 1 and not FULL,
            )  # fmt: skip
            if i == 0:
                total_lane, tilt_lane = exp, tilted
            else:
                total_lane += exp
                tilt_lane += tilted
        total = tl.sum(total_lane, 0)
    else:
        # The row is read twice: every lane first keeps its own maximum, and then its own sum.
        largest_lane = tl.full((PIECE,), -float("inf"), tl.float32)
        added = tl.zeros((PIECE,), tl.float32)
        for start in range(0, columns, PIECE):
            logit = _load(row, lane, start, columns, not FULL)
            largest_lane = tl.maximum(largest_lane, logit.to(tl.float32))
            if SMOOTHED:
                added += _addend(logit, lane, start, columns, not FULL)
        largest = _capped(tl.max(largest_lane, 0), softcap)
        if SMOOTHED:
            sum_of_logits = tl.sum(added, 0)
        tl.debug_barrier()
        total_lane = tl.zeros((PIECE,), tl.float32)
        tilt_lane = tl.zeros((PIECE,), tl.float32)
        for start in range(0, columns, PIECE):
            logit = _load(row, lane, start, columns, not FULL)
            exp, tilted = _replace(
                row, lane, start, logit, largest, columns, softcap, slope, scale, PIECES, not FULL
            )  # fmt: skip
            total_lane += exp
            if ENTROPY:
                tilt_lane += tilted
        total = tl.sum(total_lane, 0)
    # 3. Clear the target's column after all stores, because any thread may have written it.
    tl.debug_barrier()
    tl.store(row + own, 0.0, mask=own >= 0)
    if PIECES > HELD:
        picked = tl.load(statistics + (3 * tokens + token))
    if temperature is not None:
        largest /= temperature
        picked /= temperature
    linear = picked * target_weight
    if SMOOTHED:
        linear += sum_of_logits * logit_weight
    # With the entropy, the linear statistic is the target's logit itself.
    fourth = picked
    if ENTROPY:
        fourth = tl.sum(tilt_lane, 0) / LOG2_E
    tl.store(target + token, own.to(tl.int64))
    # One store by four threads takes a third of the instructions of four separate stores.
    kind = tl.arange(0, 4)
    value = tl.where(kind < 2, tl.where(kind == 0, largest, total), tl.where(kind == 2, linear, fourth))
    tl.store(statistics + (kind * tokens + token), value)


def exponentiate_(
    logits_nv: torch.Tensor,
    labels_n: torch.Tensor,
    first: int,
    target_weight: float,
    logit_weight: float = 0.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    slope: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace logits by E = exp(logit - row maximum), and the target's column by zero; see `EagerOperations`.

    The rows of the logits (fp32, bf16 or fp16) are contiguous. Everything is computed in fp32; E is rounded once, to
    the logits' dtype. Sums have a fixed order, so two runs give the same bits.
    """
    (tokens, columns), stride = logits_nv.shape, logits_nv.stride(0)
    launch = launch_for(columns, logits_nv.dtype)
    assert logits_nv.stride(1) == 1 and columns
    assert not (entropy or temperature != 1) or (target_weight, logit_weight) == (1, 0)
    assert not launch.pieces or (launch.pieces - 1) * launch.piece < columns <= launch.pieces * launch.piece
    labels_n = labels_n.contiguous()
    statistics_4n = torch.empty(4, tokens, dtype=torch.float32, device=logits_nv.device)
    target_n = torch.empty_like(labels_n)
    unit = VECTOR if columns % VECTOR == 0 and stride % VECTOR == 0 else 1
    options: dict[str, int] = {}
    held = min(launch.held, launch.pieces)
    if softcap or entropy:
        pass  # Kernels with tanh or a second sum have no register limit.
    elif columns <= FULLY_OCCUPYING_ROW and unit > 1 and not logit_weight and _fits_32_registers(launch, logits_nv):
        options["maxnreg"] = 32
    _exponentiate[(tokens,)](
        logits_nv, stride // unit, labels_n, first, target_weight, logit_weight, softcap or None,
        (slope and softcap) or None, temperature if temperature != 1 else None, statistics_4n, target_n, tokens,
        columns // unit,
        PIECES=launch.pieces,
        PIECE=launch.piece,
        HELD=held,
        FULL=_is_full(launch, columns),
        UNIT=unit,
        SMOOTHED=logit_weight != 0,
        ENTROPY=entropy,
        num_warps=launch.warps,
        enable_fp_fusion=True,
        **options,
    )  # fmt: skip
    return statistics_4n[: 3 + entropy], target_n, statistics_4n[2 if entropy else 3]


def _is_full(launch: Launch, columns: int) -> bool:
    """Whether the last piece needs no mask.

    With three pieces, the mask is kept, because without a mask, Triton 3.9 spills registers at compute capability 10.0.
    """
    return columns % launch.piece == 0 and launch.pieces != 3


def _fits_32_registers(launch: Launch, logits_nv: torch.Tensor) -> bool:
    """Whether programs for aligned rows can be limited to 32 registers per thread without spilling registers."""
    if not 0 < min(launch.pieces, launch.held) <= CAPPED_PIECES[logits_nv.dtype]:
        return False
    if launch.warps > 4 or launch.pieces <= launch.held or logits_nv.device.type == "cpu":
        return True
    # With Triton 3.9 at compute capability 10.0, programs of four warps that read pieces twice need 33 registers per
    # thread.
    return triton.runtime.driver.active.get_current_target().arch < 100


@triton.jit(do_not_specialize=["shards", "tokens"])
def _fold(total, gathered, shards, tokens, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    size = ROWS * tokens.to(tl.int64)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for shard in range(shards):
        own = tl.load(gathered + shard * size + token, mask=inside, other=-float("inf"))
        largest = tl.maximum(largest, own)
    # If all shards are empty, `largest` is -inf, and the difference of two infinities would be NaN.
    finite = tl.maximum(largest, -3.4e38)
    sum_of_all = tl.zeros((BLOCK,), tl.float32)
    linear_of_all = tl.zeros((BLOCK,), tl.float32)
    tilt_of_all = tl.zeros((BLOCK,), tl.float32)
    for shard in range(shards):
        row = gathered + shard * size + token
        own = tl.load(row, mask=inside, other=-float("inf"))
        sum_of_all += tl.load(row + tokens, mask=inside, other=0.0) * tl.exp(own - finite)
        linear_of_all += tl.load(row + 2 * tokens, mask=inside, other=0.0)
        if ROWS > 3:
            below = tl.maximum(own - finite, LOWEST)
            moved = tl.load(row + 3 * tokens, mask=inside, other=0.0)
            moved += below * tl.load(row + tokens, mask=inside, other=0.0)
            tilt_of_all += moved * tl.exp(below)
    tl.store(total + token, largest, mask=inside)
    tl.store(total + tokens + token, sum_of_all, mask=inside)
    tl.store(total + 2 * tokens + token, linear_of_all, mask=inside)
    if ROWS > 3:
        tl.store(total + 3 * tokens + token, tilt_of_all, mask=inside)


def fold_(total_3n: torch.Tensor, gathered_r3n: torch.Tensor) -> None:
    """Fold the packed fp32 statistics of several shards into `total_3n`, in shard order; see `EagerOperations`."""
    shards, statistics, tokens = gathered_r3n.shape
    assert total_3n.is_contiguous() and gathered_r3n.is_contiguous()
    grid = (triton.cdiv(tokens, TOKENS_A_PROGRAM),)
    _fold[grid](total_3n, gathered_r3n, shards, tokens, ROWS=statistics, BLOCK=TOKENS_A_PROGRAM, enable_fp_fusion=True)
