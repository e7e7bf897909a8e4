"""Writes lowered programs (every instruction of every rank) as JSON, for other simulators and debuggers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron_vp.schedule.formats import chosen_entries
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Program, Run
from megatron_vp.schedule.passes import Schedule


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
    document = {
        "schedule": schedule.name,
        "vocab": schedule.vocab.value,
        "pipeline_size": schedule.pipeline_size,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement.stage_of,
        **chosen_entries(schedule),
        "programs": [[_entry(each, program.vocab_members) for each in program.instructions] for program in programs],
    }
    return json.dumps(document)


def _entry(instruction: Instruction, vocab_members: Sequence[int]) -> dict[str, object]:
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
