"""Communicators that are made at their first use, as NCCL's are, hold up no schedule."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from megatron_vp.runtime.groups import PipelineGroups
from tests.harness.ranks import RankError, run_ranks
from tests.runtime.toy import reference, run_pipeline

STEPS = [(1, True), (3, True)]


def made_at_first_use(rank: int, world: int, schedule: str, method: str, connects: bool) -> list:
    """`run_pipeline` where the first message on a communicator waits, on the host, until the peer uses it, too."""
    used = set()

    def waiting_for_the_peer(operation):
        def start(tensor, *args, group=None, **kwargs):
            if group not in used:
                used.add(group)
                dist.barrier(group=group)
            return operation(tensor, *args, group=group, **kwargs)

        return start

    names = ("isend", "irecv", "send", "recv")
    connect = PipelineGroups._connect if connects else lambda self: None
    with (
        mock.patch.multiple(dist, **{name: waiting_for_the_peer(getattr(dist, name)) for name in names}),
        mock.patch.object(PipelineGroups, "_connect", connect),
    ):
        return run_pipeline(rank, world, schedule, method, STEPS, False)


@pytest.mark.parametrize(("schedule", "world", "method"), [("1f1b", 2, "vocab-1"), ("zb-h1", 3, "vocab-2")])
def test_the_first_iteration_ends(schedule, world, method):
    results = run_ranks(world, made_at_first_use, schedule, method, True, timeout=60)
    for iteration, (microbatches, _) in enumerate(STEPS):
        losses, _ = reference(world, microbatches, iteration, False)
        assert results[-1][iteration][0] == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
def test_without_a_first_use_ahead_of_it_it_would_not():
    with pytest.raises(RankError, match="did not finish"):
        run_ranks(2, made_at_first_use, "1f1b", "vocab-1", False, timeout=8)
