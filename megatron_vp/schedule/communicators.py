"""Which communicators a schedule needs on each rank, found without creating any.

Each directed edge between two pipeline ranks has a communicator of its own for each kind of message. The vocabulary
collectives share one communicator of the ranks that take part in them (`Placement.vocab_members`): all p ranks of a
pipeline where every rank holds vocabulary rows. With tensor parallelism the t ranks of a stage share one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.transfers import Channel

Edge = tuple[int, int, Channel]
"""A directed edge between two pipeline ranks (source, target), and what it carries."""

CHANNELS = 4
"""NCCL channels, one thread block each, that an operation on one of these communicators may use."""


@dataclass(frozen=True)
class RankCommunicators:
    """The communicators of one rank.

    edges: those that start or end here, a communicator each. pipeline, tensor: sizes of the group of the vocabulary
    collectives and of the group of the stage's tensor ranks; a group of one needs no communicator, and a rank that
    takes no part in the vocabulary collectives counts as a group of one in both. row_peers: ranks with which this one
    exchanges embedding rows, over the pipeline's communicator.
    """

    edges: tuple[Edge, ...]
    pipeline: int
    tensor: int
    row_peers: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of communicators."""
        return len(self.edges) + (self.pipeline > 1) + (self.tensor > 1)


def all_edges(placement: Placement, sharded: bool) -> set[Edge]:
    """Every directed edge that a schedule on `placement` uses.

    sharded: the vocabulary layers are split. If they are whole, three more edges tie a last stage that is not on rank
    p-1 to the loss function there.
    """
    seats = [(placement.rank_of(stage), placement.rank_of(stage + 1)) for stage in range(placement.stages - 1)]
    edges = {
        edge
        for here, there in seats
        if here != there
        for edge in ((here, there, Channel.ACTIVATION), (there, here, Channel.GRADIENT))
    }
    end, loss = placement.last_rank, placement.ranks - 1
    if not sharded and end != loss:
        edges |= {(loss, end, Channel.LABELS), (end, loss, Channel.TOKEN_LOSS), (loss, end, Channel.TOKEN_GRADIENT)}
    return edges


def row_pairs(
    placement: Placement, embeds_on_last_stage: bool = False, vocab_ranks: tuple[int, ...] | None = None
) -> set[tuple[int, int]]:
    """Pairs of ranks, the smaller one first, that exchange embedding rows: word ranks with every owner of rows.

    The first stage's rank takes the rows of its shards' owners, which are `vocab_ranks` (None: all ranks). With
    multi-token prediction (`embeds_on_last_stage`) the last stage's rank takes them as well.
    """
    owners = range(placement.ranks) if vocab_ranks is None else vocab_ranks
    words = {placement.first_rank} | ({placement.last_rank} if embeds_on_last_stage else set())
    return {(min(word, other), max(word, other)) for word in words for other in owners if other != word}


@lru_cache(maxsize=8)
def communicators(
    placement: Placement,
    sharded: bool,
    tensor: int = 1,
    embeds_on_last_stage: bool = False,
    vocab_ranks: tuple[int, ...] | None = None,
) -> tuple[RankCommunicators, ...]:
    """The communicators of every pipeline rank; `tensor` pipelines side by side share a model replica.

    `vocab_ranks` hold the vocabulary rows (None: all ranks).
    """
    every = range(placement.ranks)
    members = every if vocab_ranks is None else placement.vocab_members(vocab_ranks)
    sizes = [(len(members), tensor) if rank in members else (1, 1) for rank in every]
    edges: list[list[Edge]] = [[] for _ in range(placement.ranks)]
    peers: list[list[int]] = [[] for _ in range(placement.ranks)]
    for edge in sorted(all_edges(placement, sharded)):
        for rank in edge[:2]:
            edges[rank].append(edge)
    for one, other in sorted(row_pairs(placement, embeds_on_last_stage, vocab_ranks)) if sharded else ():
        peers[one].append(other)
        peers[other].append(one)
    return tuple(
        RankCommunicators(tuple(own), *size, tuple(sorted(words)))
        for own, size, words in zip(edges, sizes, peers, strict=True)
    )
