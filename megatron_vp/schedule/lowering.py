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

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.dependencies import build_graph, check_passes, join_pairs
from megatron_vp.schedule.graph import Graph, Node, Step, gc_paused
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Program, Run, RunPair, Wait
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.node_times import durations, node_times
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, ScheduleError
from megatron_vp.schedule.transfers import Channel, Collective, CollectiveKind, Copy, Message, Operation

Event = tuple[tuple[float, int], Step | Operation, list[Operation]]
"""A step or an operation, its time with a number that breaks ties, and for a step, the operations that it waits for."""


@gc_paused()
def lower(schedule: Schedule, costs: Costs | None = None, mtp_stage: int | None = None) -> tuple[Program, ...]:
    """Lower a schedule to one program per rank. The programs cannot deadlock, even if every post blocks until its
    operation is complete.

    The costs affect only the points at which programs communicate or call the loss function. `mtp_stage` is the stage
    of multi-token prediction, which also uses the tokens' embeddings, or None. An interlaced schedule is first expanded
    by `expand_interlaced`. Raises ScheduleError if the schedule cannot run.
    """
    check_passes(schedule)
    schedule = expand_interlaced(schedule)
    graph = build_graph(schedule, with_loss=True, mtp_stage=mtp_stage)
    joined = join_pairs(graph, schedule)
    writer = _Writer(schedule, mtp_stage)
    for _, work, needed in sorted(_events(schedule, graph, joined, costs or PassCosts()), key=itemgetter(0)):
        if isinstance(work, Step):
            writer.run(work, needed)
        else:
            writer.post(work)
    return tuple(
        Program(rank, tuple(instructions), writer.members) for rank, instructions in enumerate(writer.instructions)
    )


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


def _tokens(microbatch: int) -> Collective:
    return Collective(CollectiveKind.TOKENS, microbatch, 0)


def _with_losses(schedule: Schedule, graph: Graph, costs: Costs) -> list[list[int]]:
    """The steps of every rank. Each loss comes before the first pass of rank p-1 that starts after the loss's input has
    arrived.

    Start and arrival times are those of the schedule without losses. In that schedule, a pass that starts before the
    input arrives cannot depend on the input. So all passes that need the loss come after it.
    """
    bare, placement = build_graph(schedule), schedule.placement
    first_of = {backward: forward for forward, backward in join_pairs(bare, schedule).items()}
    bare_orders, orders = bare.numbers(schedule.ranks), graph.numbers(schedule.ranks)
    times = node_times(bare, bare_orders, durations(bare, schedule, costs))
    place_of = {number: place for place, number in enumerate(times.order)}
    # A pair's backward sorts with its forward, so that no loss comes between them.
    heads = [first_of.get(number, number) for number in bare_orders[-1]]
    last = [((times.start[one], place_of[one]), other) for one, other in zip(heads, orders[-1], strict=True)]
    for microbatch in range(schedule.microbatches):
        needed: Node = Collective(CollectiveKind.C1, microbatch, placement.last_rank)
        if not schedule.vocab.is_sharded:
            needed = Step(placement.last_rank, Pass(PassKind.F, microbatch, placement.chunk_of(placement.stages - 1)))
        number, loss = bare.number(needed), Step(schedule.pipeline_size - 1, Loss(microbatch))
        last.append(((times.end[number], place_of[number]), graph.number(loss)))
    return [*orders[:-1], [number for _, number in sorted(last, key=itemgetter(0))]]


def _events(schedule: Schedule, graph: Graph, joined: dict[int, int], costs: Costs) -> Iterator[Event]:
    """All steps and operations. The tokens of a microbatch are sent one microbatch early, just before any rank starts
    to embed the previous one. `joined` maps the forward of each pair to its backward. A pair is over when its backward
    is; then come the messages of the forward, those of the backward, and the weight gradients that the pair leaves.
    """
    times = node_times(graph, _with_losses(schedule, graph, costs), durations(graph, schedule, costs))
    nodes, successors = graph.nodes, graph.successors
    place_of = {number: place for place, number in enumerate(times.order)}
    first_of = {backward: forward for forward, backward in joined.items()}
    embeds = [math.inf] * schedule.microbatches
    for place, number in enumerate(times.order):
        node = nodes[number]
        if isinstance(node, Step):
            last = joined.get(number, number)
            over = times.end[last], place_of[last]
            before = (nodes[each] for each in graph.predecessors[number])
            needed = [each for each in before if not isinstance(each, Step)]
            if isinstance(node.action, Pass) and node.action.kind is PassKind.IF:
                microbatch = node.action.microbatch
                needed.append(_tokens(microbatch))
                embeds[microbatch] = min(embeds[microbatch], times.start[number])
            yield over, node, needed
            if number not in joined:
                after = dict.fromkeys((*successors[first_of.get(number, number)], *successors[number]))
                made = (nodes[each] for each in after)
                yield from ((over, each, []) for each in made if isinstance(each, Message | Copy))
            if number in first_of and schedule.split_backward:
                yield over, Step(node.rank, _of_kind(PassKind.W, node.action)), []
        elif isinstance(node, Collective):
            yield (times.start[number], place), node, []
    for microbatch in range(schedule.microbatches if schedule.vocab.is_sharded else 0):
        moment = min(embeds[microbatch], embeds[max(0, microbatch - 1)]), microbatch - schedule.microbatches
        yield moment, _tokens(microbatch), []


def _of_kind(kind: PassKind, action: Any) -> Pass:
    return Pass(kind, action.microbatch, action.chunk)


class _Writer:
    """Writes the programs of all ranks, and adds the waits and reads that instructions need."""

    def __init__(self, schedule: Schedule, mtp_stage: int | None) -> None:
        self.schedule, self.members = schedule, schedule.vocab_members
        ranks = range(schedule.pipeline_size)
        # These ranks receive embedding rows without running IF.
        self.only_words = schedule.placement.word_ranks(mtp_stage) - set(schedule.vocab_ranks)
        self.instructions: list[list[Instruction]] = [[] for _ in ranks]
        self.waited: list[set[Operation]] = [set() for _ in ranks]

    def run(self, step: Step, needed: Sequence[Operation]) -> None:
        """Write a pass or a loss, after waits for its inputs. The second pass of a pair joins the first, which has
        waited for the inputs of both.
        """
        rank, action = step
        if isinstance(action, Pass) and action.kind is not PassKind.F:
            forward = self.schedule.partners.get((rank, action))
            if forward is not None:
                self.instructions[rank][-1] = RunPair(forward, _of_kind(PassKind.B, action))
                return
        self.read(rank, action)
        written, waited = self.instructions[rank], self.waited[rank]
        written += [Wait(operation) for operation in needed if operation not in waited]
        waited.update(needed)
        written.append(action if isinstance(action, Loss) else Run(action))

    def post(self, operation: Operation) -> None:
        """Write an operation's posts on all its members."""
        for rank in operation.members(self.members):
            self.read(rank, operation)
            if rank in self.only_words and isinstance(operation, Collective) and operation.kind is CollectiveKind.EMBED:
                self.instructions[rank].append(Wait(_tokens(operation.microbatch)))
            self.instructions[rank].append(Post(operation))

    def read(self, rank: int, work: Operation | Pass | Loss) -> None:
        """Write a Load if `work` is the first work of its microbatch that uses data read on this rank.

        Rank 0 reads token ids, and rank p-1 reads labels. If the vocabulary layers are sharded, both ranks send their
        data to all vocabulary members. Otherwise the first stage's F uses the token ids, and the last stage's F uses
        the labels, which rank p-1 sends if another rank holds the last stage.
        """
        schedule, placement, last = self.schedule, self.schedule.placement, self.schedule.pipeline_size - 1
        match work:
            case Collective(kind=CollectiveKind.TOKENS):
                reads = rank in (0, last)
            case Message(channel=Channel.LABELS):
                reads = rank == work.source
            case Pass(kind=PassKind.F) if not schedule.vocab.is_sharded:
                place = rank, placement.stage_of[rank][work.chunk]
                reads = place in ((0, 0), (last, placement.stages - 1))
            case _:
                reads = False
        if reads:
            self.instructions[rank].append(Load(work.microbatch))
