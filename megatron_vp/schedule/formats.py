"""Writes schedules and programs as JSON, writes schedules as CSV, and reads schedules from both.

The CSV format is that of `torch.distributed.pipelining`: one line per rank, one cell per pass. A pass consists of a
virtual stage, a kind and a microbatch: `2F0` is a forward. If the file has passes `2I0` (input gradient) and `2W0`
(weight gradient), `2B0` is a whole backward. PyTorch also writes `(2F3;5B1)OVERLAP_F_B` for two overlapped passes, and
empty cells for bubbles. Our further kinds of pass are written alike, with the rank's first stage where a pass belongs
to no stage: `2S0`. Such a file needs its vocabulary method only if it is vocab-1: the line `# vocab=vocab-1`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Program, Run, RunPair, Wait, passes_of
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.timeline import Timeline

CELL = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})")
TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
METHOD = "# vocab="


def to_json(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """The schedule as JSON. If a timeline is given, the JSON also contains metrics and each pass's start and end."""
    document = _head(schedule)
    document["ranks"] = [
        [{"pass": step.kind.value, "chunk": step.chunk, "microbatch": step.microbatch} for step in order]
        for order in schedule.ranks
    ]
    if timeline:
        for order, spans in zip(document["ranks"], timeline.spans, strict=True):
            for entry, (start, end) in zip(order, spans, strict=True):
                entry |= {"start": start, "end": end}
        document["metrics"] = {
            "makespan": timeline.makespan,
            "bubble_fraction": timeline.bubble_fraction,
            "peak_activation": timeline.peak_activation,
        }
        if schedule.offloaded:
            document["metrics"] |= {"peak_host": timeline.peak_host}
    return json.dumps(document)


def _head(schedule: Schedule) -> dict[str, Any]:
    """What the JSON of schedules and programs begins with. Empty values of the last three are left out."""
    optional = {"shape": schedule.shape, "offloaded": schedule.offloaded, "pairs": _pairs_as_text(schedule)}
    return {
        "schedule": schedule.name,
        "vocab": schedule.vocab.value,
        "pipeline_size": schedule.pipeline_size,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement.stage_of,
    } | {key: value for key, value in optional.items() if value}


def _pairs_as_text(schedule: Schedule) -> list[list[list[str]]]:
    return [[[str(step) for step in pair] for pair in pairs] for pairs in schedule.pairs]


def programs_to_json(schedule: Schedule, programs: Sequence[Program]) -> str:
    """The programs of a schedule as JSON, with one list of instructions per rank.

    Instructions have three forms:

    - `{"do": "run", "pass": "F", "chunk": 0, "microbatch": 3}`; the pass `LOSS` is the user's loss function, and
      `LOAD` reads the microbatch's data;
    - `{"do": "post", "operation": "activation:3[0>1]", "members": [0, 1], "lane": "0>1 activation"}`;
    - `{"do": "wait", ...}` with the same keys as a post.

    A forward and a backward that run as one are two adjacent runs with the key `"joined": true`. A rank that runs them
    one after the other waits for the same operations and posts the same.

    An operation has the same name on all its members. All members post the operations of a lane in the same order, and
    the operations complete in this order. An interlaced schedule is lowered with S, T, IF and IB in place of V.
    """
    instructions = [
        [entry for each in one.instructions for entry in _entries(each, one.vocab_members)] for one in programs
    ]
    return json.dumps(_head(schedule) | {"programs": instructions})


def _entries(instruction: Instruction, vocab_members: Sequence[int]) -> Iterator[dict[str, object]]:
    """The entry of an instruction, or the two entries of a pair."""
    match instruction:
        case Run() | RunPair():
            joined = {"joined": True} if isinstance(instruction, RunPair) else {}
            for kind, microbatch, chunk in passes_of(instruction):
                yield {"do": "run", "pass": kind.value, "chunk": chunk, "microbatch": microbatch} | joined
        case Load() | Loss():
            name = type(instruction).__name__.upper()
            yield {"do": "run", "pass": name, "chunk": 0, "microbatch": instruction.microbatch}
        case Post(operation) | Wait(operation):
            yield {
                "do": "post" if isinstance(instruction, Post) else "wait",
                "operation": str(operation),
                "members": list(operation.members(vocab_members)),
                "lane": operation.lane,
            }


def from_text(text: str) -> Schedule:
    """Read a schedule from JSON or CSV. Raises UserError."""
    return from_json(text) if text.lstrip().startswith("{") else from_csv(text)


def from_json(text: str) -> Schedule:
    """Read what `to_json` wrote, with or without times and metrics.

    The backward is split if the file has W passes. Raises a UserError that names the first format error; whether the
    schedule is valid is checked only by `validate`.
    """
    try:
        document = json.loads(text)
        name, shape = (str(each) for each in (document["schedule"], document.get("shape", "")))
        microbatches = _whole(document["microbatches"])
        placement = Placement(tuple(tuple(map(_whole, row)) for row in document["placement"]))
        orders = tuple(
            tuple(_pass(entry, f"pass {number} of rank {rank}") for number, entry in enumerate(order))
            for rank, order in enumerate(document["ranks"])
        )
        pairs = tuple(
            tuple((Pass.parse(forward), Pass.parse(backward)) for forward, backward in each)
            for each in document.get("pairs", ())
        )
        method = VocabMethod(document["vocab"])
        schedule = _checked(Schedule(name, method, placement, microbatches, orders, shape, pairs))
        own = {"offloaded": ()} | _head(schedule)
        for key in ("pipeline_size", "chunks", "offloaded"):
            expected = json.loads(json.dumps(own[key]))
            if document.get(key, expected) != expected:
                raise ValueError(
                    f"the file sets '{key}' to {document[key]}, but its placement and passes require {expected}"
                )
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        missing = "it lacks the key " if isinstance(error, KeyError) else ""
        raise UserError(f"the schedule file is not in megatron_vp's JSON format: {missing}{error}") from None
    if PassKind.BW not in schedule.kinds or schedule.split_backward:
        return schedule

    # Whole backwards are called B in a schedule without W.
    def named(steps: Iterable[Pass]) -> tuple[Pass, ...]:
        return tuple(step._replace(kind=PassKind.B) if step.kind is PassKind.BW else step for step in steps)

    both = tuple(tuple((forward, named([backward])[0]) for forward, backward in each) for each in pairs)
    return replace(schedule, ranks=tuple(map(named, orders)), pairs=both)


def _pass(entry: dict[str, Any], which: str) -> Pass:
    try:
        return Pass(PassKind(entry["pass"]), _whole(entry["microbatch"]), _whole(entry.get("chunk", 0)))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{which}: {error}") from None


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _checked(schedule: Schedule) -> Schedule:
    """Raise ValueError if the number of microbatches cannot be right; a huge number would exhaust memory later."""
    longest = max(map(len, schedule.ranks), default=0)
    if not 1 <= schedule.microbatches <= longest:
        raise ValueError(
            f"the schedule has {schedule.microbatches} microbatches, but no rank lists more than {longest} passes: "
            "give at least 1 microbatch, and number them from 0 without gaps"
        )
    return schedule


def to_csv(schedule: Schedule) -> str:
    """The schedule as CSV, without its name."""
    split = {PassKind.B: "I", PassKind.BW: "B"} if schedule.split_backward else {}
    lines = []
    for rank, (stages, order) in enumerate(zip(schedule.placement.stage_of, schedule.ranks, strict=True)):
        cells: list[str] = []
        for step in order:
            cells.append(f"{stages[step.chunk]}{split.get(step.kind, step.kind)}{step.microbatch}")
            if step.kind is not PassKind.F and (rank, step) in schedule.partners:
                cells[-2:] = [f"({cells[-2]};{cells[-1]})OVERLAP_F_B"]
        lines.append(",".join(cells))
    if schedule.vocab is VocabMethod.VOCAB_1:
        lines.append(f"{METHOD}{schedule.vocab}")
    return "\n".join([*lines, ""])


def from_csv(text: str) -> Schedule:
    """Read what `to_csv` or PyTorch wrote, and number each rank's chunks by ascending stage. Raises UserError."""
    lines = {number: line for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    try:
        methods = [VocabMethod(line.removeprefix(METHOD).strip()) for line in lines.values() if line.startswith(METHOD)]
        texts = [(line, number) for number, line in lines.items() if not line.startswith(METHOD)]
        rows = [_cells(line, number) for line, number in texts]
        used = {kind for row in rows for _, kind, _ in row}
        # If backwards are split, PyTorch's I is our B, and its B is our BW.
        kinds = {name: PassKind(name) for name in used - {"I"}} | {"I": PassKind.B}
        if used & {"I", "W"}:
            kinds["B"] = PassKind.BW
        sharded = VocabMethod.VOCAB_2 if used & {*VocabMethod.VOCAB_2.passes} else VocabMethod.NONE
        vocab = methods[0] if methods else VocabMethod.INTERLACED if "V" in used else sharded
        stages = [sorted({stage for stage, kind, _ in row if kind == "F"}) for row in rows]
        placement = Placement(tuple(map(tuple, stages)))
        orders, pairs = [], []
        for rank, row in enumerate(rows):
            if foreign := {stage for stage, _, _ in row} - {*stages[rank]}:
                raise ValueError(f"rank {rank} has passes of stage {min(foreign)}, but no forward of this stage")
            steps = {
                (stage, kind, number): Pass(
                    kinds[kind], number, stages[rank].index(stage) if kinds[kind].per_chunk else 0
                )
                for stage, kind, number in row
            }
            orders.append(tuple(map(steps.__getitem__, row)))
            joined = [_cells(pair, texts[rank][1]) for pair in TOGETHER.findall(texts[rank][0])]
            pairs.append(tuple((steps[first], steps[second]) for first, second in joined))
        microbatches = 1 + max(step.microbatch for order in orders for step in order)
        both = tuple(pairs) if any(pairs) else ()
        return _checked(Schedule("pytorch", vocab, placement, microbatches, tuple(orders), pairs=both))
    except ValueError as error:
        raise UserError(f"the schedule file is not in PyTorch's CSV format: {error}") from None


def _cells(line: str, number: int) -> list[tuple[int, str, int]]:
    """Stage, kind and microbatch of every pass of a rank."""
    found = []
    for cell in filter(None, map(str.strip, re.split("[,;]", TOGETHER.sub(r"\1", line)))):
        match = CELL.fullmatch(cell)
        if match is None or match[2] not in (*PassKind, "I"):
            raise ValueError(
                f"line {number}: {cell[:40]!r} is not a pass such as 2F0 or 0S3: write the schedule as JSON, or with "
                "PyTorch's _dump_csv and format='compute_only'"
            )
        found.append((int(match[1]), match[2], int(match[3])))
    return found
