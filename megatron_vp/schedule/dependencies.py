"""Builds the dependency graph of a schedule: its passes and the communication between them.

The rules follow arXiv 2411.05288, section 4. F waits for the previous stage's F. S waits for the last stage's output
(collective C0). T waits for the softmax statistics of all shards (collective C1). The last stage's B waits for the last
barrier of the vocabulary method. W waits for its B. Only ranks with vocabulary rows run IF, S, T and IB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from megatron_vp.schedule.graph import Graph, Node, Pattern, Step
from megatron_vp.schedule.instructions import Loss
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.passes import Pass, Schedule, ScheduleError, VocabMethod
from megatron_vp.schedule.transfers import Channel, Collective, CollectiveKind, Message

BASE_KINDS = frozenset({PassKind.F, PassKind.B, PassKind.W, PassKind.BW})
"""Passes of the transformer chunks."""

OFFLOAD_KINDS = frozenset({PassKind.O, PassKind.R})
"""Passes that move activations to host memory and back."""

VOCABULARY_KINDS = frozenset(kind for method in VocabMethod for kind in method.passes)


def check_passes(schedule: Schedule) -> None:
    """Raise ScheduleError unless every rank lists each of its passes exactly once, and otherwise only optional passes.

    With vocab-1 and vocab-2, a rank must list all vocabulary passes or none, and at least one rank must list them. A BW
    counts as a B and its W. If a rank lists O or R of a chunk, it must list both for every microbatch. Passes of
    further kinds are optional. A rank may list each of them once. The passes of a pair must be adjacent.
    """
    if len(schedule.ranks) != schedule.pipeline_size:
        raise ScheduleError(
            f"schedule lists {len(schedule.ranks)} ranks, but its placement has {schedule.pipeline_size}"
        )
    if schedule.vocab.is_sharded and not schedule.vocab_ranks:
        raise ScheduleError(
            f"no rank has vocabulary passes, but {schedule.vocab} needs {', '.join(schedule.vocab.passes)} on at least "
            f"one rank (schedule: {schedule.name})"
        )
    backward = (PassKind.B, PassKind.W) if schedule.split_backward else (PassKind.B,)
    chunked = (PassKind.F, *backward) if schedule.has_backward else (PassKind.F,)
    single = [kind for kind in schedule.vocab.passes if kind.forward or schedule.has_backward]
    own_choice = schedule.kinds - BASE_KINDS - OFFLOAD_KINDS - VOCABULARY_KINDS
    chunks, microbatches = range(schedule.chunks), range(schedule.microbatches)
    for rank, order in enumerate(schedule.ranks):
        seats = [(kind, chunk) for kind in chunked for chunk in chunks]
        seats += [(kind, 0) for kind in single if rank in schedule.vocab_ranks]
        moved = [chunk for each, chunk in schedule.offloaded if each == rank and chunk in chunks]
        seats += [(kind, chunk) for kind in (PassKind.O, PassKind.R) for chunk in moved]
        expected = [Pass(kind, microbatch, chunk) for microbatch in microbatches for kind, chunk in seats]
        if len(order) == len(expected) and {*order} == {*expected}:
            continue
        optional = {(kind, chunk) for kind in own_choice for chunk in (chunks if kind.per_chunk else (0,))}
        found = Counter(
            Pass(kind, microbatch, chunk)
            for whole, microbatch, chunk in order
            for kind in (backward if whole is PassKind.BW else (whole,))
        )
        allowed = optional.union(seats)
        defects = {
            "lacks": [step for step in expected if step not in found],
            "repeats": [step for step in found if found[step] > 1],
            "must not list": [
                step for step in found if (step.kind, step.chunk) not in allowed or step.microbatch not in microbatches
            ],
        }
        words = [f"{verb} {_listed(steps)}" for verb, steps in defects.items() if steps]
        if words:
            raise ScheduleError(f"rank {rank} {' and '.join(words)} ({schedule.name}, {schedule.vocab})")
    _check_pairs(schedule)


def _check_pairs(schedule: Schedule) -> None:
    """Raise ScheduleError unless every pair is a forward and the whole backward right after it on its rank."""
    whole = PassKind.BW if schedule.split_backward else PassKind.B
    if schedule.pairs and len(schedule.pairs) != schedule.pipeline_size:
        raise ScheduleError(f"pairs are listed for {len(schedule.pairs)} of {schedule.pipeline_size} ranks")
    for rank, (order, pairs) in enumerate(zip(schedule.ranks, schedule.pairs, strict=False)):
        neighbours = {*pairwise(order)}
        for forward, backward in pairs:
            if (forward.kind, backward.kind) != (PassKind.F, whole) or (forward, backward) not in neighbours:
                raise ScheduleError(
                    f"rank {rank} cannot run {forward} and {backward} as one: a pair is an F and the {whole} right "
                    f"after it ({schedule.name})"
                )


def returning_at_once(schedule: Schedule) -> list[tuple[int, Pass]]:
    """Return (rank, R) for every R that no computing pass separates from its O."""
    found: list[tuple[int, Pass]] = []
    for rank, order in enumerate(schedule.ranks):
        left: set[tuple[int, int]] = set()
        for step in order:
            if step.kind is PassKind.O:
                left.add((step.chunk, step.microbatch))
            elif step.kind is not PassKind.R:
                left.clear()
            elif (step.chunk, step.microbatch) in left:
                found.append((rank, step))
    return found


def _listed(steps: Sequence[Pass]) -> str:
    return " ".join(map(str, steps[:8])) + (" ..." if len(steps) > 8 else "")


def build_graph(schedule: Schedule, with_loss: bool = False, mtp_stage: int | None = None) -> Graph:
    """Build the dependency graph of the passes of `schedule`, without the order in which ranks run them.

    `with_loss` adds the loss function on rank p-1 and the communication of its input and its gradient. Without the
    loss, T waits only for the softmax statistics, as in arXiv 2411.05288. `mtp_stage`, the stage of multi-token
    prediction, also waits for the tokens' embeddings.
    """
    variants, patterns = _variants(schedule), {}
    for variant in dict.fromkeys(variants):
        rules = _Rules(schedule, with_loss, mtp_stage, variant)
        rules.apply()
        patterns[variant] = Pattern(rules.nodes, rules.before)
    return Graph([patterns[variant] for variant in variants])


def join_pairs(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """Join the passes that run as one (`Schedule.pairs`). Maps the number of each pair's forward to its backward's."""
    halves = ([[pair[half] for pair in each] for each in schedule.pairs] for half in (0, 1))
    joined = dict(zip(*(chain(*graph.numbers(half)) for half in halves), strict=True))
    for forward, backward in joined.items():
        graph.join(forward, backward)
    return joined


Variant = frozenset[tuple[int, Pass]]
"""A microbatch's whole backwards (BW) and optional passes (such as O and R), as (rank, pass) pairs. All these
passes have the microbatch number 0, so that variants of different microbatches can be equal.
"""


def _variants(schedule: Schedule) -> list[Variant]:
    """The variant of each microbatch."""
    special = schedule.kinds - BASE_KINDS - set(schedule.vocab.passes) | schedule.kinds & {PassKind.BW}
    found: list[set[tuple[int, Pass]]] = [set() for _ in range(schedule.microbatches)]
    for rank, order in enumerate(schedule.ranks):
        for step in order:
            if step.kind in special:
                found[step.microbatch].add((rank, step._replace(microbatch=0)))
    return list(map(frozenset, found))


def join_vocabulary_passes(graph: Graph, orders: Sequence[Sequence[int]]) -> None:
    """Make a microbatch's V passes start together: delay the broadcast before them until every rank reaches its V."""
    for order in orders:
        for before, after in pairwise(order):
            if graph.kinds[after] is PassKind.V:
                graph.link(before, graph.predecessors[after][0])


@dataclass(frozen=True, slots=True)
class _Rules:
    """Lists the nodes of microbatch 0 and their predecessors; methods take and return indices into `nodes`."""

    schedule: Schedule
    with_loss: bool
    mtp_stage: int | None
    variant: Variant
    nodes: list[Node] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)

    def apply(self) -> None:
        placement, sharded = self.schedule.placement, self.schedule.vocab.is_sharded
        arrived = embedded = []
        if sharded:
            embedded = [self.collective(CollectiveKind.EMBED, placement.first_rank, self.shards(PassKind.IF))]
            arrived = embedded
        for stage in range(placement.stages):
            if stage == self.mtp_stage:
                arrived = arrived + embedded
            done = self.chunk(PassKind.F, stage, arrived)
            if stage < placement.stages - 1:
                arrived = [self.hand_over(Channel.ACTIVATION, done, stage, stage + 1)]
        arrived = self.whole_output_layer(done) if self.schedule.vocab is VocabMethod.NONE else self.output_layer(done)
        if self.schedule.has_backward:
            for stage in reversed(range(placement.stages)):
                done = self.backward(stage, arrived)
                if stage:
                    arrived = [self.hand_over(Channel.GRADIENT, done, stage, stage - 1)]
            if sharded:
                self.shards(PassKind.IB, [self.collective(CollectiveKind.EMBED_GRAD, placement.first_rank, [done])])
        self.passes_of_choice()

    def backward(self, stage: int, arrived: list[int]) -> int:
        """Add a whole backward, or B and W. Returns the pass that computes the input gradient."""
        placement = self.schedule.placement
        whole = Pass(PassKind.BW, 0, placement.chunk_of(stage))
        if (placement.rank_of(stage), whole) in self.variant:
            return self.chunk(PassKind.BW, stage, arrived)
        done = self.chunk(PassKind.B, stage, arrived)
        if self.schedule.split_backward:
            self.chunk(PassKind.W, stage, [done])
        return done

    def passes_of_choice(self) -> None:
        """Add the optional passes (such as O and R) with the dependencies that `PassKind` defines for them."""
        own = [(rank, step) for rank, step in sorted(self.variant) if step.kind not in BASE_KINDS]
        for rank, step in own:
            self.add(Step(rank, step), [])
        places = {node: place for place, node in enumerate(self.nodes)}
        for rank, step in own:
            kind, filled = step.kind, places[Step(rank, step)]
            of_kind = {each: places.get(Step(rank, step._replace(kind=each))) for each in PassKind}
            before = [place for each in kind.waits_for if (place := of_kind[PassKind(each)]) is not None]
            self.before[filled] += before if kind.through is None else [self.add(kind.through(rank, step), before)]
            if kind.filled_by is not None:
                filled = self.add(kind.filled_by(rank, step), [filled])
            for giver in BASE_KINDS:
                place = of_kind[giver]
                if place is not None and {*giver.releases} & {*kind.holds}:
                    self.before[place].append(filled)

    def output_layer(self, last_forward: int) -> list[int]:
        """Add S and T, or V, with their collectives and the loss. Returns the nodes that the last stage's B awaits."""
        loss_rank, root = self.schedule.pipeline_size - 1, self.schedule.placement.last_rank
        broadcast = self.collective(CollectiveKind.C0, root, [last_forward])
        if self.schedule.vocab is VocabMethod.INTERLACED:
            return self.shards(PassKind.V, [broadcast])
        scores = self.shards(PassKind.S, [broadcast])
        gates = [self.collective(CollectiveKind.C1, root, scores)]
        if self.with_loss:
            loss = self.add(Step(loss_rank, Loss(0)), gates)
        if not self.schedule.has_backward:
            return []
        if self.with_loss:
            gates.append(self.collective(CollectiveKind.LOSS_GRAD, loss_rank, [loss]))
        gradients = self.shards(PassKind.T, gates)
        if self.schedule.vocab is VocabMethod.VOCAB_1:
            gates.append(self.collective(CollectiveKind.C2, root, gradients))
        return gates

    def whole_output_layer(self, last_forward: int) -> list[int]:
        """Add the loss of an unsharded output layer, and return the nodes that the last stage's B waits for.

        If rank p-1 does not hold the last stage, it sends the labels to the last stage after its own F of chunk 0.
        """
        if not self.with_loss:
            return [last_forward]
        loss_rank, last_rank = self.schedule.pipeline_size - 1, self.schedule.placement.last_rank
        loss = Step(loss_rank, Loss(0))
        if last_rank == loss_rank:
            return [self.add(loss, [last_forward])]
        reader = self.nodes.index(Step(loss_rank, Pass(PassKind.F, 0)))
        self.before[last_forward].append(self.last_stage_message(Channel.LABELS, reader, loss_rank, last_rank))
        token_loss = self.last_stage_message(Channel.TOKEN_LOSS, last_forward, last_rank, loss_rank)
        done = self.add(loss, [token_loss])
        if not self.schedule.has_backward:
            return []
        return [self.last_stage_message(Channel.TOKEN_GRADIENT, done, loss_rank, last_rank)]

    def add(self, node: Node, after: Sequence[int]) -> int:
        self.nodes.append(node)
        self.before.append(list(after))
        return len(self.nodes) - 1

    def chunk(self, kind: PassKind, stage: int, after: list[int]) -> int:
        placement = self.schedule.placement
        return self.add(Step(placement.rank_of(stage), Pass(kind, 0, placement.chunk_of(stage))), after)

    def shards(self, kind: PassKind, after: Sequence[int] = ()) -> list[int]:
        return [self.add(Step(rank, Pass(kind, 0)), after) for rank in self.schedule.vocab_ranks]

    def collective(self, kind: CollectiveKind, root: int, after: list[int]) -> int:
        return self.add(Collective(kind, 0, root), after)

    def hand_over(self, channel: Channel, before: int, source_stage: int, target_stage: int) -> int:
        """Return the node that the target stage waits for: a message or, within a rank, the step `before` itself."""
        source, target = (self.schedule.placement.rank_of(stage) for stage in (source_stage, target_stage))
        if source == target:
            return before
        return self.add(Message(channel, 0, source_stage, target_stage, source, target), [before])

    def last_stage_message(self, channel: Channel, before: int, source: int, target: int) -> int:
        last = self.schedule.placement.stages - 1
        return self.add(Message(channel, 0, last, last, source, target), [before])
