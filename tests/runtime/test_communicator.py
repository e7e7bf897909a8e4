"""Test that a communicator moves the values that its operations name."""

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
