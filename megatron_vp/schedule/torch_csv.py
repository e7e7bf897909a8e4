"""Writes and reads schedules in the CSV format of `torch.distributed.pipelining`: one line per rank, one cell per pass.

A pass consists of a virtual stage, a kind and a microbatch: `2F0` is a forward. If the file has passes `2I0` (input
gradient) and `2W0` (weight gradient), `2B0` is a whole backward. PyTorch also writes `(2F3;5B1)OVERLAP_F_B` for two
overlapped passes, and empty cells for bubbles. Our further kinds of pass are written alike, with the rank's first stage
where a pass belongs to no stage: `2S0`. Such a file needs its vocabulary method only if it is vocab-1: the line
`# vocab=vocab-1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_vp.errors import UserError
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.passes import Pass, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement

_PASS = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_METHOD = "# vocab="


def to_csv(schedule: Schedule) -> str:
    """The schedule as CSV, without its name."""
    split = {PassKind.B: "I", PassKind.BW: "B"} if schedule.split_backward else {}
    lines = [
        ",".join(f"{stages[step.chunk]}{split.get(step.kind, step.kind)}{step.microbatch}" for step in order)
        for stages, order in zip(schedule.placement.stage_of, schedule.ranks, strict=True)
    ]
    if schedule.vocab is VocabMethod.VOCAB_1:
        lines.append(f"{_METHOD}{schedule.vocab}")
    return "\n".join([*lines, ""])


def from_csv(text: str) -> Schedule:
    """Read what `to_csv` or PyTorch wrote, and number each rank's chunks by ascending stage. Raises UserError."""
    rows, vocab = [], None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.startswith(_METHOD):
                vocab = VocabMethod(line.removeprefix(_METHOD).strip())
            elif line.strip():
                rows.append(list(_passes(line)))
        except ValueError as error:
            raise UserError(f"line {number}: {error}") from None
    used = {kind for row in rows for _, kind, _ in row}
    # If backwards are split, PyTorch's I is our B, and its B is our BW.
    kinds = {name: PassKind(name) for name in used - {"I"}} | {"I": PassKind.B}
    if used & {"I", "W"}:
        kinds["B"] = PassKind.BW
    if vocab is None:
        sharded = VocabMethod.VOCAB_2 if used & {"S", "T", "IF", "IB"} else VocabMethod.NONE
        vocab = VocabMethod.INTERLACED if "V" in used else sharded
    stages = [sorted({stage for stage, kind, _ in row if kind == "F"}) for row in rows]
    try:
        placement = Placement(tuple(map(tuple, stages)))
    except ValueError as error:
        raise UserError(f"the schedule file in PyTorch's CSV format: {error}") from None
    orders = []
    for rank, row in enumerate(rows):
        foreign = next((stage for stage, _, _ in row if stage not in stages[rank]), None)
        if foreign is not None:
            raise UserError(f"schedule file: rank {rank} has a pass of stage {foreign}, but no forward of this stage")
        steps = [(kinds[kind], number, stages[rank].index(stage)) for stage, kind, number in row]
        orders.append(tuple(Pass(kind, number, chunk if kind.per_chunk else 0) for kind, number, chunk in steps))
    microbatches = 1 + max(step.microbatch for order in orders for step in order)
    schedule = Schedule("pytorch", vocab, placement, microbatches, tuple(orders))
    try:
        check_microbatches(schedule)
    except ValueError as error:
        raise UserError(f"schedule file: {error}") from None
    return schedule


def check_microbatches(schedule: Schedule) -> None:
    """Raise ValueError if the number of microbatches cannot be right; a huge number would exhaust memory later."""
    longest = max(map(len, schedule.ranks), default=0)
    if not 1 <= schedule.microbatches <= longest:
        raise ValueError(
            f"the schedule has {schedule.microbatches} microbatches, but no rank lists more than {longest} passes: "
            "give at least 1 microbatch, and number them from 0 without gaps"
        )


def _passes(line: str) -> Iterator[tuple[int, str, int]]:
    """Stage, kind and microbatch of every pass of a rank."""
    for cell in filter(None, map(str.strip, line.split(","))):
        together = _TOGETHER.fullmatch(cell)
        for each in together[1].split(";") if together else [cell]:
            match = _PASS.fullmatch(each.strip())
            if match is None or match[2] not in (*PassKind, "I"):
                raise ValueError(
                    f"{each[:40]!r} is not a pass such as 2F0 or 0S3: write the schedule as JSON, or with PyTorch's "
                    "_dump_csv and format='compute_only'"
                )
            yield int(match[1]), match[2], int(match[3])
