"""Test the harness: results are ordered by rank, errors name the failing rank, and no case hangs."""

import os
import time

import pytest
import torch

from tests.harness import RankError, process_group, run_ranks


def share(rank, world_size, factor, *, offset):
    with process_group(rank, world_size):
        total = torch.tensor([float(rank * factor + offset)])
        torch.distributed.all_reduce(total)
        return rank, total


def fail_on_one(rank, world_size):
    with process_group(rank, world_size):
        if rank == 1:
            raise KeyError("the reason")
        torch.distributed.barrier()


def die(rank, _world_size):
    print("last words", flush=True)
    if rank == 1:
        os._exit(3)
    return rank


def sleep_on_one(rank, _world_size):
    if rank == 2:
        print("still asleep", flush=True)
        time.sleep(60)


def test_results_come_back_in_rank_order():
    assert run_ranks(3, share, 10, offset=1) == [(rank, torch.tensor([33.0])) for rank in range(3)]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fail_on_one, ["rank 1 failed", "KeyError: 'the reason'"]),
        (die, ["rank 1 failed", "died without a report", "last words"]),
    ],
)
def test_a_failing_rank_is_named_and_the_others_are_not_waited_for(function, said):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        run_ranks(2, function)
    assert all(text in str(error.value) for text in said)
    assert time.monotonic() - start < 20


def test_a_rank_that_does_not_finish_is_named():
    with pytest.raises(RankError, match=r"ranks \[2\] did not finish within 3 s(.|\n)*still asleep"):
        run_ranks(3, sleep_on_one, timeout=3)
