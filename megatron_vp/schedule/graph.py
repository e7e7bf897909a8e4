"""Assigns numbers to the nodes (steps and operations) of all microbatches, and records their dependencies.

Usually the nodes and dependencies of all microbatches follow one pattern, which is stored only once. If, for example,
only some backwards are split, there are a few patterns. The nodes of each microbatch have consecutive numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_vp.schedule.instructions import Loss
from megatron_vp.schedule.passes import Pass, PassKind
from megatron_vp.schedule.transfers import Operation


class Step(NamedTuple):
    """Work on a rank: a pass, or a call of the loss function."""

    rank: int
    action: Pass | Loss

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank}"


Node = Step | Operation
Link = tuple[tuple[int, Pass], tuple[int, Pass]]
"""Two passes, each with its rank; the second waits for the first."""


class Pattern:
    """The nodes of microbatch 0 and their dependencies: node k waits for the nodes with indices `before[k]`."""

    def __init__(self, nodes: Sequence[Node], before: Sequence[Sequence[int]]) -> None:
        self.nodes, self.before = nodes, before
        self.place = {node: place for place, node in enumerate(nodes)}
        self.place_of_pass = {
            (node.rank, node.action.kind, node.action.chunk): place
            for place, node in enumerate(nodes)
            if isinstance(node, Step) and isinstance(node.action, Pass)
        }


class Graph:
    """The nodes of all microbatches and their dependencies; microbatch i follows the pattern `patterns[i]`.

    Node n waits for the nodes `predecessors[n]`, and the nodes `successors[n]` wait for it. `lanes[n]` is the lane of
    node n: a rank r < `ranks`, or a communicator. A lane runs one node at a time. `kinds[n]` is the kind of pass of
    node n, or None if the node is not a pass.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self.patterns = patterns
        self.ranks = 1 + max(rank for rank, _, _ in patterns[0].place_of_pass)
        self._bases = list(accumulate((len(pattern.nodes) for pattern in patterns), initial=0))[:-1]
        numbered = list(zip(self._bases, patterns, strict=True))
        self.predecessors = [[base + one for one in places] for base, each in numbered for places in each.before]
        self.successors: list[list[int]] = [[] for _ in self.predecessors]
        for number, earlier in enumerate(self.predecessors):
            for one in earlier:
                self.successors[one].append(number)
        communicators: dict[str, int] = {}

        def lane(node: Node) -> int:
            if isinstance(node, Step):
                return node.rank
            return communicators.setdefault(node.lane, self.ranks + len(communicators))

        self.lanes = self.of_nodes(lane)
        self.kinds = self.of_nodes(_kind)

    def of_nodes[T](self, value: Callable[[Node], T]) -> list[T]:
        """The list of `value(node)` for all nodes, computed once per pattern; `value` must ignore the microbatch."""
        by_pattern = {pattern: list(map(value, pattern.nodes)) for pattern in dict.fromkeys(self.patterns)}
        return [each for pattern in self.patterns for each in by_pattern[pattern]]

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes by number, created at first use."""
        return [
            _of_microbatch(node, microbatch) for microbatch, each in enumerate(self.patterns) for node in each.nodes
        ]

    @cached_property
    def posted_behind(self) -> dict[int, int]:
        """Maps a step to the operation, such as a copy, that is posted after it and involves only the step's rank."""
        alone = self.of_nodes(lambda node: not isinstance(node, Step) and len(node.members(())) == 1)
        return {self.predecessors[number][0]: number for number, is_alone in enumerate(alone) if is_alone}

    def as_posted(self, orders: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each rank's operations from `posted_behind`, in the order of posting; `orders[r]` lists rank r's steps."""
        posted = self.posted_behind
        return [[posted[step] for step in order if step in posted] for order in orders]

    def link_one_queue(self, orders: Sequence[Sequence[int]]) -> None:
        """Delay the step after each Post of a copy until the rank's previous copy has ended.

        On a device with one hardware queue, a copy that cannot start yet blocks everything issued after it.
        """
        posted = self.posted_behind
        for order in orders:
            posts = [(place, posted[step]) for place, step in enumerate(order) if step in posted]
            for (_, before), (place, _) in pairwise(posts):
                if place + 1 < len(order):
                    self.link(before, order[place + 1])

    def number(self, node: Node) -> int:
        """Number of `node`. Raises KeyError if the node is not in the graph."""
        microbatch = node.action.microbatch if isinstance(node, Step) else node.microbatch
        return self._bases[microbatch] + self.patterns[microbatch].place[_of_microbatch(node, 0)]

    def number_of_pass(self, rank: int, step: Pass) -> int:
        """Number of a pass of `rank`. Raises KeyError if the pass is not in the graph."""
        kind, microbatch, chunk = step
        return self._bases[microbatch] + self.patterns[microbatch].place_of_pass[rank, kind, chunk]

    def numbers(self, ranks: Sequence[Sequence[Pass]]) -> list[list[int]]:
        """The numbers of the passes of every rank, in the order in which `ranks[r]` lists them."""
        places = [each.place_of_pass for each in self.patterns]
        bases = self._bases
        return [
            [bases[step.microbatch] + places[step.microbatch][rank, step.kind, step.chunk] for step in order]
            for rank, order in enumerate(ranks)
        ]

    def link(self, before: int, after: int) -> None:
        """Make node `after` also wait for node `before`."""
        self.successors[before].append(after)
        self.predecessors[after].append(before)

    def join(self, forward: int, backward: int) -> None:
        """Let two passes of a rank run as one: the first waits for the inputs of both, and what waits for one waits
        for both.
        """
        for before in self.predecessors[backward]:
            if before not in self.predecessors[forward]:
                self.link(before, forward)
        for after in self.successors[forward]:
            if after not in self.successors[backward]:
                self.link(backward, after)


def _kind(node: Node) -> PassKind | None:
    return node.action.kind if isinstance(node, Step) and isinstance(node.action, Pass) else None


def _of_microbatch(node: Node, microbatch: int) -> Node:
    if not isinstance(node, Step):
        return node._replace(microbatch=microbatch)
    action = node.action
    if isinstance(action, Loss):
        return Step(node.rank, Loss(microbatch))
    return Step(node.rank, Pass(action.kind, microbatch, action.chunk))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which slows the generation of large schedules by a third.

    The collector is not needed, because schedules contain no reference cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
