"""Activations that wait in the host's memory: the same gradients, and nothing of them on the device meanwhile."""

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.runtime.toy import run_pipeline

STEPS = [(1, True), (3, True), (2, False), (8, True)]


@pytest.mark.parametrize(
    ("name", "world", "method", "chunks"),
    [("1f1b", 2, "vocab-2", 1), ("zb-v", 3, "vocab-1", 1), ("po", 2, "vocab-2", 2), ("interleaved", 4, "vocab-2", 1)],
)
def test_gradients_are_bit_for_bit_those_without(name, world, method, chunks):
    both = [
        run_ranks(world, run_pipeline, name, method, STEPS, False, rehearses=True, offload_chunks=count, timeout=120)
        for count in (0, chunks)
    ]
    for plain, offloaded in zip(*both, strict=True):
        for one, other in zip(plain, offloaded, strict=True):
            assert one[0] == other[0] and one[3] == other[3]
            assert one[1].keys() == other[1].keys()
            assert all(torch.equal(one[1][each], other[1][each]) for each in one[1] if one[1][each] is not None)
    fullest = [max(rank[-1][2][0] for rank in ranks) for ranks in both]
    assert fullest[1] < fullest[0]
