"""Reads the schedules that `torch.distributed.pipelining` writes: one line per rank, actions separated by commas.

An action consists of a virtual stage, a letter and a microbatch: `2F0` is a forward, `2I0` an input gradient, `2W0` a
weight gradient, and `2B0` a whole backward. `(2F3;5B1)OVERLAP_F_B` is two overlapped actions. Empty cells are
bubbles.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from megatron_vp.errors import UserError
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.passes import Pass, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement

_ACTION = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})?")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_FIRST = re.compile(r"[\s,]*\(?\d+[A-Z_]+\d*")


def looks_like_actions(text: str) -> bool:
    """Whether the first non-empty cell of `text` looks like a PyTorch action."""
    return _FIRST.match(text) is not None


def from_torch_csv(text: str) -> Schedule:
    """Read PyTorch's CSV of compute actions, and number each rank's chunks by ascending stage. Raises UserError."""
    reader = csv.reader(io.StringIO(text))
    try:
        rows = [list(_actions(row)) for row in reader if row]
    except ValueError as error:
        raise UserError(f"line {reader.line_num}: {error}") from None
    except csv.Error as error:  # before the reader has counted the line
        raise UserError(f"line {1 + reader.line_num}: {error}") from None
    splits = any(letter in "IW" for row in rows for _, letter, _ in row)
    # If backwards are split, PyTorch's I is our B, and its B is our BW.
    kinds = {"F": PassKind.F, "I": PassKind.B, "W": PassKind.W, "B": PassKind.BW if splits else PassKind.B}
    stages = [sorted({stage for stage, letter, _ in row if letter == "F"}) for row in rows]
    try:
        placement = Placement(tuple(map(tuple, stages)))
    except ValueError as error:
        raise UserError(f"the schedule file in PyTorch's CSV format: {error}") from None
    orders = []
    for rank, row in enumerate(rows):
        foreign = next((stage for stage, _, _ in row if stage not in stages[rank]), None)
        if foreign is not None:
            raise UserError(f"schedule file: rank {rank} has a pass of stage {foreign}, but no forward of this stage")
        orders.append(tuple(Pass(kinds[a], microbatch, stages[rank].index(stage)) for stage, a, microbatch in row))
    microbatches = 1 + max((step.microbatch for order in orders for step in order), default=0)
    longest = max(map(len, orders))
    if microbatches > longest:
        raise UserError(
            f"schedule file: a microbatch has the number {microbatches - 1}, although no rank has more than {longest} "
            "passes; number the microbatches from 0 without gaps"
        )
    return Schedule("pytorch", VocabMethod.NONE, placement, microbatches, tuple(orders))


def _actions(cells: list[str]) -> Iterator[tuple[int, str, int]]:
    """Stage, letter and microbatch of every compute action of a rank."""
    for cell in filter(None, map(str.strip, cells)):
        together = _TOGETHER.fullmatch(cell)
        for each in together[1].split(";") if together else [cell]:
            match = _ACTION.fullmatch(each.strip())
            if match is None:
                raise ValueError(f"{each[:40]!r} is not a PyTorch action such as 2F0 or 2B0")
            stage, letter, microbatch = match.groups()
            if letter not in ("F", "I", "W", "B"):
                raise ValueError(
                    f"{each[:40]} is not a compute action; write the file with PyTorch's _dump_csv "
                    "and format='compute_only'"
                )
            if microbatch is None:
                raise ValueError(f"{each[:40]} has no microbatch number; add one at the end, as in 2F0")
            yield int(stage), letter, int(microbatch)
