"""Lowers a schedule of passes to each rank's program, which includes communication.

All events of all ranks are sorted by simulated time. The time of a pass or a loss is its end. The time of a message or
a copy is the end of the step that produces its data. The time of a collective is its start. In this order, every event
comes after all events that it waits for. So ranks that post and wait in this order cannot deadlock, even if every post
blocks until its operation is complete.

CUDA devices need this guarantee for two reasons. First, streams may share one hardware queue, in which an operation
that cannot start stalls everything issued after it. Second, the host may have to wait at any step until the device is
idle, for example when CUDA loads a kernel, the allocator frees memory, or a debugger or a timer synchronises. Therefore
no receive is posted before its message's position in this order. A receive posted earlier could occupy the device while
the message's sender waits for a pass that the receiving rank has not run yet.

Rank 0 reads a microbatch's token ids and rank p-1 reads its labels, each right before the first instruction that uses
them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.dependencies import build_graph, check_passes
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.gc_paused import gc_paused
from megatron_vp.schedule.graph import Graph, Node, Step
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Program, Run, Wait
from megatron_vp.schedule.node_times import Moment, NodeTimes, durations, node_times
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, ScheduleError
from megatron_vp.schedule.transfers import Channel, Collective, CollectiveKind, Message, Operation


@gc_paused()
def lower(schedule: Schedule, costs: Costs | None = None, mtp_stage: int | None = None) -> tuple[Program, ...]:
    """Lower a schedule to one program per rank. The programs cannot deadlock, even if every post blocks until its
    operation is complete.

    The costs affect only the points at which programs communicate or call the loss function. `mtp_stage` is the stage
    of multi-token prediction, which also uses the tokens' embeddings, or None. An interlaced schedule is first expanded
    by `expand_interlaced`. Raises ScheduleError if the schedule cannot run.
    """
    costs = costs or PassCosts()
    check_passes(schedule)
    line = _lay_out(expand_interlaced(schedule), costs, mtp_stage)
    return tuple(_RankLowering(line, rank).program() for rank in range(schedule.pipeline_size))


def check_reading(programs: Sequence[Program]) -> None:
    """Raise ScheduleError unless rank 0 reads token ids in the order in which rank p-1 reads labels."""
    first, last = (
        [each.microbatch for each in program.instructions if isinstance(each, Load)]
        for program in (programs[0], programs[-1])
    )
    if first != last:
        place = next(place for place, (one, other) in enumerate(zip(first, last, strict=True)) if one != other)
        raise ScheduleError(
            f"rank 0 reads microbatch {first[place]}, but rank {len(programs) - 1} reads microbatch {last[place]} at "
            "the same place in its order: tokens and labels would not match; order the microbatches of the first and "
            "the last stage in the same way"
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """A schedule laid out in time. `orders` lists the steps of each rank, including the calls to the loss function.
    `over` lists the end times of all nodes.

    `collectives` has the operations that all members of the vocabulary communicator post in the same order (see
    `Operation.follows_step`), with their start times.
    """

    schedule: Schedule
    graph: Graph
    orders: list[list[int]]
    over: list[Moment]
    collectives: list[tuple[Moment, Operation]]
    mtp_stage: int | None


def _lay_out(schedule: Schedule, costs: Costs, mtp_stage: int | None) -> _Line:
    graph = build_graph(schedule, with_loss=True, mtp_stage=mtp_stage)
    orders = graph.numbers(schedule.ranks)
    orders[-1] = _with_losses(schedule, costs, graph, orders)
    times = node_times(graph, orders, durations(graph, schedule, costs))
    starts = times.moments(times.start)
    collectives: list[tuple[Moment, Operation]] = [
        (starts[number], node)
        for number, node in enumerate(graph.nodes)
        if not isinstance(node, Step) and not node.follows_step
    ]
    collectives += _token_moments(schedule, graph, times)
    collectives.sort(key=lambda item: item[0])
    return _Line(schedule, graph, orders, times.moments(times.end), collectives, mtp_stage)


def _with_losses(schedule: Schedule, costs: Costs, graph: Graph, orders: list[list[int]]) -> list[int]:
    """Insert each loss into rank p-1's steps, before the first pass that starts after the loss's input has arrived.

    Start and arrival times are those of the schedule without losses. In that schedule, a pass that starts before the
    input arrives cannot depend on the input. So all passes that need the loss come after it.
    """
    bare = build_graph(schedule)
    bare_orders = bare.numbers(schedule.ranks)
    times = node_times(bare, bare_orders, durations(bare, schedule, costs))
    moment = times.moments(times.start)
    starts = [moment[number] for number in bare_orders[-1]]
    arrived = times.moments(times.end)
    placement, losses = schedule.placement, []
    for microbatch in range(schedule.microbatches):
        needed: Node
        if schedule.vocab.is_sharded:
            needed = Collective(CollectiveKind.C1, microbatch, placement.last_rank)
        else:
            needed = Step(placement.last_rank, Pass(PassKind.F, microbatch, placement.chunk_of(placement.stages - 1)))
        loss = Step(schedule.pipeline_size - 1, Loss(microbatch))
        losses.append((arrived[bare.number(needed)], graph.number(loss)))
    inserted: dict[int, list[int]] = {}
    for arrival, number in sorted(losses):
        inserted.setdefault(bisect_right(starts, arrival), []).append(number)
    return [
        number
        for place in range(len(starts) + 1)
        for number in (*inserted.get(place, ()), *orders[-1][place : place + 1])
    ]


def _token_moments(schedule: Schedule, graph: Graph, times: NodeTimes) -> list[tuple[Moment, Collective]]:
    """For each microbatch, return when its tokens are sent, and the collective that sends them. Tokens are sent one
    microbatch early, just before any rank starts to embed the previous microbatch.
    """
    if not schedule.vocab.is_sharded:
        return []
    moments = []
    for microbatch in range(schedule.microbatches):
        first = min(
            times.start[graph.number(Step(rank, Pass(PassKind.IF, either)))]
            for rank in schedule.vocab_ranks
            for either in (microbatch, max(0, microbatch - 1))
        )
        moments.append(((first, microbatch - schedule.microbatches), Collective(CollectiveKind.TOKENS, microbatch, 0)))
    return moments


class _RankLowering:
    """Orders the steps and posts of one rank by time, and inserts the waits and reads that they need."""

    def __init__(self, line: _Line, rank: int) -> None:
        self.line, self.rank = line, rank
        self.order = line.orders[rank]
        self.over = [line.over[number] for number in self.order]

    def program(self) -> Program:
        members = self.line.schedule.vocab_members
        collectives = [entry for entry in self.line.collectives if self.rank in entry[1].members(members)]
        unordered = [*self.behind_own_steps(), *self.behind_others_steps(), *collectives]
        posts = deque(sorted(unordered, key=itemgetter(0)))
        waited: set[Operation] = set()
        instructions: list[Instruction] = []
        for number, over in zip(self.order, self.over, strict=True):
            while posts and posts[0][0] < over:
                instructions += self.post(posts.popleft()[1])
            needed = [operation for operation in self.inputs(number) if operation not in waited]
            waited.update(needed)
            action = self.line.graph.step(number).action
            if self.reads_data_for(action):
                instructions.append(Load(action.microbatch))
            instructions += map(Wait, needed)
            instructions.append(action if isinstance(action, Loss) else Run(action))
        for _, operation in posts:
            instructions += self.post(operation)
        in_order = tuple(operation for _, operation in collectives)
        return Program(self.rank, tuple(instructions), in_order, members)

    def post(self, operation: Operation) -> list[Instruction]:
        """The Post of an operation, preceded by a Load if this rank must first read data, or by a Wait if it must first
        receive token ids.
        """
        if self.reads_data_for(operation):
            return [Load(operation.microbatch), Post(operation)]
        if self.takes_tokens_for(operation):
            return [Wait(Collective(CollectiveKind.TOKENS, operation.microbatch, 0)), Post(operation)]
        return [Post(operation)]

    def takes_tokens_for(self, operation: Operation) -> bool:
        """Whether `operation` must wait for token ids because it brings embedding rows to a rank without IF passes."""
        schedule = self.line.schedule
        words = schedule.placement.word_ranks(self.line.mtp_stage)
        embeds = isinstance(operation, Collective) and operation.kind is CollectiveKind.EMBED
        return embeds and self.rank in words and self.rank not in schedule.vocab_ranks

    def reads_data_for(self, work: Operation | Pass | Loss) -> bool:
        """Whether `work` is the first work of its microbatch that uses data read on this rank.

        Rank 0 reads token ids, and rank p-1 reads labels. If the vocabulary layers are sharded, both ranks send their
        data to all vocabulary members. Otherwise the first stage's F uses the token ids, and the last stage's F uses
        the labels, which rank p-1 sends if another rank holds the last stage.
        """
        schedule, rank = self.line.schedule, self.rank
        placement, last = schedule.placement, schedule.pipeline_size - 1
        match work:
            case Collective(kind=CollectiveKind.TOKENS):
                return rank in (0, last)
            case Message(channel=Channel.LABELS):
                return rank == work.source
            case Pass(kind=PassKind.F) if not schedule.vocab.is_sharded:
                stage = placement.stage_of[rank][work.chunk]
                return (rank == 0 and stage == 0) or (rank == last and stage + 1 == placement.stages)
        return False

    def inputs(self, number: int) -> list[Operation]:
        """The operations whose results a step uses."""
        graph = self.line.graph
        found = [graph.nodes[before] for before in graph.predecessors[number]]
        operations = [node for node in found if not isinstance(node, Step)]
        action = graph.step(number).action
        if isinstance(action, Pass) and action.kind is PassKind.IF:
            operations.append(Collective(CollectiveKind.TOKENS, action.microbatch, 0))
        return operations

    def behind_own_steps(self) -> Iterator[tuple[Moment, Operation]]:
        """The sends of this rank's results, each placed at the end of the step that produces the result."""
        graph = self.line.graph
        for number, over in zip(self.order, self.over, strict=True):
            made = (graph.nodes[after] for after in graph.successors[number])
            yield from ((over, node) for node in made if not isinstance(node, Step) and node.follows_step)

    def behind_others_steps(self) -> Iterator[tuple[Moment, Operation]]:
        """The receives of other ranks' results, each placed at the end of the step that produces the result."""
        graph = self.line.graph
        for number in self.order:
            for operation in self.inputs(number):
                if operation.follows_step:
                    maker = graph.predecessors[graph.number(operation)][0]
                    if graph.step(maker).rank != self.rank:
                        yield self.line.over[maker], operation
