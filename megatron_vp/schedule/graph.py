"""Steps and operations of all microbatches and what waits for what, by number.

Every microbatch has the same nodes with the same dependencies: those of one are listed, those of the others counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_vp.schedule.instructions import Loss, Operation, communicator
from megatron_vp.schedule.passes import Pass, PassKind


class Step(NamedTuple):
    """Computation on a rank: a pass, or the loss function."""

    rank: int
    action: Pass | Loss

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank}"


Node = Step | Operation


class Graph:
    """Node `i * size + k` is microbatch i's copy of `pattern[k]`, a node of microbatch 0.

    `successors[n]` wait for node n, which waits for `predecessors[n]`. `lanes[n]` is what runs it, one node at a time:
    a rank r < `ranks`, or a communicator. `kinds[n]` is the kind of a pass, None for other nodes.
    """

    def __init__(self, pattern: Sequence[Node], before: Sequence[Sequence[int]], microbatches: int) -> None:
        """`before[k]` are the places in `pattern` of what node k waits for."""
        self.pattern, self.size, self.microbatches = pattern, len(pattern), microbatches
        after: list[list[int]] = [[] for _ in pattern]
        for place, earlier in enumerate(before):
            for one in earlier:
                after[one].append(place)
        self.predecessors, self.successors = self._repeated(before), self._repeated(after)
        self.ranks = 1 + max(node.rank for node in pattern if isinstance(node, Step))
        communicators: dict[tuple, int] = {}
        self.lanes = microbatches * [
            node.rank
            if isinstance(node, Step)
            else communicators.setdefault(communicator(node), self.ranks + len(communicators))
            for node in pattern
        ]
        self.kinds = microbatches * [
            node.action.kind if isinstance(node, Step) and isinstance(node.action, Pass) else None for node in pattern
        ]
        self._place = {node: place for place, node in enumerate(pattern)}
        self._place_of_pass: list[dict[tuple[PassKind, int], int]] = [{} for _ in range(self.ranks)]
        for place, node in enumerate(pattern):
            if isinstance(node, Step) and isinstance(node.action, Pass):
                self._place_of_pass[node.rank][node.action.kind, node.action.chunk] = place

    def _repeated(self, neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
        bases = range(0, self.size * self.microbatches, self.size)
        return [[base + place for place in places] for base in bases for places in neighbours]

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes, made when they are first asked for."""
        return [_of_microbatch(node, microbatch) for microbatch in range(self.microbatches) for node in self.pattern]

    def number(self, node: Node) -> int:
        """Number of `node`. Raises KeyError for one that is not in the graph."""
        microbatch = node.action.microbatch if isinstance(node, Step) else node.microbatch
        return microbatch * self.size + self._place[_of_microbatch(node, 0)]

    def numbers(self, ranks: Sequence[Sequence[Pass]]) -> list[list[int]]:
        """The numbers of the passes of every rank, in the order in which `ranks[r]` lists them."""
        return [
            [step.microbatch * self.size + place[step.kind, step.chunk] for step in order]
            for order, place in zip(ranks, self._place_of_pass, strict=True)
        ]

    def link(self, before: int, after: int) -> None:
        """Make node `after` wait for node `before`, too."""
        self.successors[before].append(after)
        self.predecessors[after].append(before)

    def link_across(self, before: Node, after: Node, distance: int) -> None:
        """Make every microbatch's `after` wait for the `before` of the microbatch `distance` earlier.

        Both are nodes of microbatch 0.
        """
        first, second = self.number(before), self.number(after) + distance * self.size
        for base in range(0, (self.microbatches - distance) * self.size, self.size):
            self.link(base + first, base + second)


def _of_microbatch(node: Node, microbatch: int) -> Node:
    if not isinstance(node, Step):
        return node._replace(microbatch=microbatch)
    action = node.action
    if isinstance(action, Loss):
        return Step(node.rank, Loss(microbatch))
    return Step(node.rank, Pass(action.kind, microbatch, action.chunk))
