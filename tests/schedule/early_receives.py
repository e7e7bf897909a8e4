"""Programs that post receives before their messages can arrive, as a negative control for tests of hosts that wait.

Every program that `lower` makes completes even if hosts wait for their devices. A program with early receives does not:
a posted receive occupies the device until its message comes, and the sender may need what this host has yet to compute.
A test that lets hosts wait must detect this deadlock; otherwise, the test proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_vp.schedule import Load, Message, Post, Program, Wait


def with_early_receives(programs: Iterable[Program]) -> tuple[Program, ...]:
    """The same programs with every receive a step further ahead, but never before another one of its lane."""
    return tuple(map(_hoisted, programs))


def _hoisted(program: Program) -> Program:
    instructions = list(program.instructions)
    for message in [each.operation for each in instructions if isinstance(each, Wait)]:
        if isinstance(message, Message):
            post = Post(message)
            now = instructions.index(post)
            steps = [place for place, each in enumerate(instructions[:now]) if not isinstance(each, Load | Post | Wait)]
            lane = [place for place, each in enumerate(instructions[:now]) if _same_lane(each, message)]
            earlier = max(steps[-1] if steps else 0, lane[-1] + 1 if lane else 0)
            instructions.insert(earlier, instructions.pop(now))
    return replace(program, instructions=tuple(instructions))


def _same_lane(instruction: object, message: Message) -> bool:
    if not isinstance(instruction, Post) or not isinstance(instruction.operation, Message):
        return False
    other = instruction.operation
    return (other.source, other.target, other.channel) == (message.source, message.target, message.channel)
