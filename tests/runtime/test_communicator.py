"""Test that a communicator moves the values that its operations name."""

import random
from unittest import mock

import pytest
import torch

from megatron_vp.runtime.groups import Communicator
from tests.harness.ranks import process_group, run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
COUNTS = [[1, 2, 0], [0, 0, 3], [2, 0, 0]]
"""Rows that rank i sends to rank j."""


def operations(process, processes, dtype):
    """Of every root, what each operation left on this rank, where it leaves something.

    Process 0 is not a member, so a rank of the communicator is not that of its process.
    """
    import torch.distributed as dist

    with process_group(process, processes):
        rank, world = process - 1, processes - 1
        own = torch.arange(12, dtype=dtype).view(3, 4) + 100 * rank
        results = {}
        group = dist.new_group(list(range(1, processes)))
        if process:
            communicator = Communicator(group, range(1, processes))
            for root in range(world):
                broadcast, reduced = own.clone(), own.clone()
                gathered = own.new_zeros((world, *own.shape))
                communicator.broadcast(broadcast, root)
                communicator.all_gather(gathered, own)
                communicator.reduce(reduced, root)
                found = [broadcast, gathered] + [reduced] * (rank == root)
                results[root] = [tensor.tolist() for tensor in found]
            incoming = [counts[rank] for counts in COUNTS]
            received = own.new_zeros((sum(incoming), 2))
            sent = own.view(-1, 2)[: sum(COUNTS[rank])]
            communicator.exchange(received, sent, incoming, COUNTS[rank])
            results["exchange"] = received.tolist()
        dist.barrier()
        return results


@pytest.fixture(scope="module")
def found():
    return {dtype: run_ranks(4, operations, dtype, timeout=60)[1:] for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_moves_what_it_says(dtype, found):
    own = [torch.arange(12, dtype=dtype).view(3, 4) + 100 * rank for rank in range(3)]
    rows = [each.view(-1, 2)[: sum(counts)].split(counts) for each, counts in zip(own, COUNTS, strict=True)]
    for rank in range(3):
        for root in range(3):
            expected = [own[root], torch.stack(own)] + [torch.stack(own).sum(0)] * (rank == root)
            assert found[dtype][rank][root] == [tensor.tolist() for tensor in expected], (rank, root)
        exchanged = torch.cat([parts[rank] for parts in rows])
        assert found[dtype][rank]["exchange"] == exchanged.tolist(), rank


def random_counts(seed, ranks):
    """Rows that rank i sends to rank j; about every other pair has none."""
    draw = random.Random(seed)
    return [[draw.choice([0, 0, 1, 3]) for _ in range(ranks)] for _ in range(ranks)]


def exchanges(rank, world, seeds):
    """Of every draw: what our exchange and the backend's all-to-all left, and the messages that ours was made of."""
    import torch.distributed as dist

    made = []

    def message(start, *arguments, **named):
        made.append((start.__name__, arguments[1]))
        return whole(start, *arguments, **named)

    whole, results = dist.P2POp, []
    with process_group(rank, world):
        group = dist.new_group(list(range(world)))
        communicator = Communicator(group, range(world))
        for seed in seeds:
            counts = random_counts(seed, world)
            incoming, outgoing = [row[rank] for row in counts], counts[rank]
            sent = torch.arange(2 * sum(outgoing), dtype=torch.float32).view(-1, 2) + 100 * rank
            ours, theirs = (torch.full((sum(incoming), 2), torch.nan) for _ in range(2))
            made.clear()
            with mock.patch.object(dist, "P2POp", message):
                communicator.exchange(ours, sent, incoming, outgoing)
            dist.all_to_all_single(theirs, sent, incoming, outgoing, group)
            results.append((ours.tolist(), theirs.tolist(), sorted(made)))
        dist.barrier()
    return results


def test_an_exchange_moves_what_an_all_to_all_does_by_messages_of_pairs_with_rows_alone():
    seeds, world = range(12), 4
    for rank, results in enumerate(run_ranks(world, exchanges, seeds, timeout=60)):
        for seed, (ours, theirs, made) in zip(seeds, results, strict=True):
            assert ours == theirs
            counts = random_counts(seed, world)
            others = [peer for peer in range(world) if peer != rank]
            sends = [("isend", peer) for peer in others if counts[rank][peer]]
            assert made == [("irecv", peer) for peer in others if counts[peer][rank]] + sends
    assert any(not any(counts[rank]) for counts in map(random_counts, seeds, [4] * 12) for rank in range(4))
