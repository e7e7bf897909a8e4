"""Lists the communicators that a schedule needs on each rank, without creating them.

Each directed edge between two pipeline ranks has one communicator per kind of message. All vocabulary collectives share
one communicator, whose members are `Placement.vocab_members`. With tensor parallelism, the tensor-parallel ranks of a
stage share another communicator for these collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.transfers import Channel

Edge = tuple[int, int, Channel]
"""Source rank, target rank, and the kind of data that is sent."""

CHANNELS = 4
"""Maximum number of NCCL channels (thread blocks) that an operation on one of our communicators may use."""


@dataclass(frozen=True)
class RankCommunicators:
    """The communicators of one rank. A group of size 1 has no communicator."""

    edges: tuple[Edge, ...]
    """the edges that start or end at this rank; each has its own communicator"""
    pipeline: int
    """size of the vocabulary collectives' group; 1 if the rank is not a member"""
    tensor: int
    """size of the stage's tensor-parallel group; 1 if the rank takes no part in the vocabulary collectives"""
    row_peers: tuple[int, ...]
    """ranks with which this rank exchanges embedding rows, over the communicator of the vocabulary collectives"""

    @property
    def count(self) -> int:
        """Number of communicators."""
        return len(self.edges) + (self.pipeline > 1) + (self.tensor > 1)


def all_edges(placement: Placement, sharded: bool) -> set[Edge]:
    """All directed edges that schedules with this `placement` use.

    If the vocabulary layers are not `sharded`, three more edges connect the last stage to the loss function on rank
    p-1, unless rank p-1 holds the last stage.
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
    placement: Placement, mtp_stage: int | None = None, vocab_ranks: tuple[int, ...] | None = None
) -> set[tuple[int, int]]:
    """Pairs of ranks that exchange embedding rows, the smaller rank first.

    The rank of the first stage exchanges rows with the owners of the rows, `vocab_ranks`; None means all ranks. With
    multi-token prediction, the rank of `mtp_stage` also exchanges rows with the owners.
    """
    owners = range(placement.ranks) if vocab_ranks is None else vocab_ranks
    words = placement.word_ranks(mtp_stage)
    return {(min(word, other), max(word, other)) for word in words for other in owners if other != word}


@lru_cache(maxsize=8)
def communicators(
    placement: Placement,
    sharded: bool,
    tensor: int = 1,
    mtp_stage: int | None = None,
    vocab_ranks: tuple[int, ...] | None = None,
) -> tuple[RankCommunicators, ...]:
    """The communicators of every pipeline rank. `vocab_ranks` hold the vocabulary rows; None means all ranks."""
    every = range(placement.ranks)
    members = every if vocab_ranks is None else placement.vocab_members(vocab_ranks)
    sizes = [(len(members), tensor) if rank in members else (1, 1) for rank in every]
    edges: list[list[Edge]] = [[] for _ in range(placement.ranks)]
    peers: list[list[int]] = [[] for _ in range(placement.ranks)]
    for edge in sorted(all_edges(placement, sharded)):
        for rank in edge[:2]:
            edges[rank].append(edge)
    for one, other in sorted(row_pairs(placement, mtp_stage, vocab_ranks)) if sharded else ():
        peers[one].append(other)
        peers[other].append(one)
    return tuple(
        RankCommunicators(tuple(own), *size, tuple(sorted(words)))
        for own, size, words in zip(edges, sizes, peers, strict=True)
    )
