"""Writes schedules and programs as JSON, and reads schedules from JSON or CSV."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Program, Run
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.timeline import Timeline
from megatron_vp.schedule.torch_csv import check_microbatches, from_csv

LONGEST_NAME = 200


def to_json(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """The schedule as JSON. If a timeline is given, the JSON also contains metrics and each pass's start and end."""
    spans = timeline.spans if timeline else [repeat(None)] * schedule.pipeline_size
    document = _head(schedule)
    document["ranks"] = [
        [_entry(step, span) for step, span in zip(order, times, strict=False)]
        for order, times in zip(schedule.ranks, spans, strict=True)
    ]
    if timeline:
        document["metrics"] = {
            "makespan": timeline.makespan,
            "bubble_fraction": timeline.bubble_fraction,
            "peak_activation": timeline.peak_activation,
        }
        if schedule.offloaded:
            document["metrics"] |= {"peak_host": timeline.peak_host}
    return json.dumps(document)


def _head(schedule: Schedule) -> dict[str, Any]:
    """What the JSON of schedules and programs begins with. Only fitted or offloading schedules have the last two."""
    optional = {"shape": schedule.shape, "offloaded": schedule.offloaded}
    return {
        "schedule": schedule.name,
        "vocab": schedule.vocab.value,
        "pipeline_size": schedule.pipeline_size,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement.stage_of,
    } | {key: value for key, value in optional.items() if value}


def _entry(step: Pass, span: tuple[float, float] | None) -> dict[str, object]:
    entry: dict[str, object] = {"pass": step.kind.value, "chunk": step.chunk, "microbatch": step.microbatch}
    return entry | {"start": span[0], "end": span[1]} if span else entry


def programs_to_json(schedule: Schedule, programs: Sequence[Program]) -> str:
    """The programs of a schedule as JSON, with one list of instructions per rank.

    Instructions have three forms:

    - `{"do": "run", "pass": "F", "chunk": 0, "microbatch": 3}`; the pass `LOSS` is the user's loss function, and
      `LOAD` reads the microbatch's data;
    - `{"do": "post", "operation": "activation:3[0>1]", "members": [0, 1], "lane": "0>1 activation"}`;
    - `{"do": "wait", ...}` with the same keys as a post.

    An operation has the same name on all its members. All members post the operations of a lane in the same order, and
    the operations complete in this order. An interlaced schedule is lowered with S, T, IF and IB in place of V.
    """
    instructions = [[_instruction(each, one.vocab_members) for each in one.instructions] for one in programs]
    return json.dumps(_head(schedule) | {"programs": instructions})


def _instruction(instruction: Instruction, vocab_members: Sequence[int]) -> dict[str, object]:
    if isinstance(instruction, Run):
        action = instruction.action
        return {"do": "run", "pass": action.kind.value, "chunk": action.chunk, "microbatch": action.microbatch}
    if isinstance(instruction, Load | Loss):
        name = "LOAD" if isinstance(instruction, Load) else "LOSS"
        return {"do": "run", "pass": name, "chunk": 0, "microbatch": instruction.microbatch}
    operation = instruction.operation
    return {
        "do": "post" if isinstance(instruction, Post) else "wait",
        "operation": str(operation),
        "members": list(operation.members(vocab_members)),
        "lane": operation.lane,
    }


def from_json(text: str) -> Schedule:
    """Read what `to_json` wrote, with or without times and metrics.

    The backward is split if the file has W passes. Raises a UserError that names the first format error; whether the
    schedule is valid is checked only by `validate`.
    """
    try:
        document = json.loads(text)
        name, shape, microbatches = document["schedule"], document.get("shape", ""), _whole(document["microbatches"])
        placement = Placement(tuple(tuple(map(_whole, row)) for row in document["placement"]))
        orders = tuple(
            tuple(_pass(entry, f"pass {number} of rank {rank}") for number, entry in enumerate(order))
            for rank, order in enumerate(document["ranks"])
        )
        for what, words in (("name", name), ("shape", shape)):
            if not isinstance(words, str) or not words.isprintable() or len(words) > LONGEST_NAME:
                raise ValueError(
                    f"the schedule's {what} must be one printable line of at most {LONGEST_NAME} characters"
                )
        schedule = Schedule(name, VocabMethod(document["vocab"]), placement, microbatches, orders, shape)
        check_microbatches(schedule)
    except KeyError as error:
        raise UserError(
            f"the schedule file lacks the key {error}, which megatron_vp's JSON format requires: add the key"
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the schedule file is not in megatron_vp's JSON format: {error}") from None
    for key, actual in (("pipeline_size", schedule.pipeline_size), ("chunks", schedule.chunks)):
        if document.get(key, actual) != actual:
            raise UserError(f"the schedule file sets '{key}' to {document[key]}, but its 'placement' requires {actual}")
    pairs = [list(pair) for pair in schedule.offloaded]
    if document.get("offloaded", pairs) != pairs:
        raise UserError(
            f"the schedule file lists {document['offloaded']} under 'offloaded', but its O and R passes are for the "
            f"(rank, chunk) pairs {pairs}"
        )
    if PassKind.BW not in schedule.kinds or schedule.split_backward:
        return schedule
    # Whole backwards are called B in a schedule without W.
    whole = {PassKind.BW: PassKind.B}
    orders = tuple(tuple(step._replace(kind=whole.get(step.kind, step.kind)) for step in order) for order in orders)
    return replace(schedule, ranks=orders)


def _pass(entry: dict[str, Any], which: str) -> Pass:
    try:
        return Pass(PassKind(entry["pass"]), _whole(entry["microbatch"]), _whole(entry.get("chunk", 0)))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{which}: {error}") from None


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def from_text(text: str) -> Schedule:
    """Read a schedule from JSON or CSV. Raises UserError."""
    return from_json(text) if text.lstrip().startswith("{") else from_csv(text)
