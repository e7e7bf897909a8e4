"""Test that communicators created at first use, as NCCL's are, do not block a schedule, and the options for NCCL."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_vp.runtime import groups
from megatron_vp.runtime.groups import CTAS, PipelineGroups
from megatron_vp.runtime.links import Links
from megatron_vp.schedule import Channel, lower
from tests.harness.ranks import RankError, run_ranks
from tests.runtime import toy
from tests.runtime.toy import reference, run_pipeline
from tests.schedule.early_receives import with_early_receives

STEPS = [(1, True), (3, True)]


def made_at_first_use(rank: int, world: int, schedule: str, method: str, early: bool) -> list:
    """`run_pipeline` where the first message on a communicator waits, on the host, until the peer uses it, too."""
    used = set()

    def waiting_for_the_peer(links, message, post=Links.post):
        group = links._groups.edges[(message.source, message.target, message.channel)]
        if group not in used:
            used.add(group)
            print("waits for the peer", flush=True)
            dist.barrier(group=group)
            print("found the peer", flush=True)
        return post(links, message)

    with (
        mock.patch.object(Links, "post", waiting_for_the_peer),
        mock.patch.object(toy, "lower", lambda whole: with_early_receives(lower(whole)) if early else lower(whole)),
    ):
        return run_pipeline(rank, world, schedule, method, STEPS, False)


@pytest.mark.parametrize(("schedule", "world", "method"), [("1f1b", 2, "vocab-1"), ("zb-h1", 3, "vocab-2")])
def test_the_first_iteration_ends(schedule, world, method):
    results = run_ranks(world, made_at_first_use, schedule, method, False, timeout=60)
    for iteration, (microbatches, _) in enumerate(STEPS):
        losses, _ = reference(world, microbatches, iteration, False)
        assert results[-1][iteration][0] == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
def test_with_early_receives_it_would_not():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish(.|\n)*waits for the peer\n$"):
        run_ranks(2, made_at_first_use, "1f1b", "vocab-1", True, timeout=8)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="PyTorch without NCCL")
def test_nccl_may_take_few_thread_blocks_on_streams_of_high_priority(monkeypatch):
    """None of normal priority, which PyTorch deals out to Megatron's groups, too: an exchange has its group's."""
    made = []

    def new_group(ranks, timeout, pg_options=None, backend="nccl"):
        if backend == "gloo":
            return mock.Mock()
        made.append((tuple(ranks), pg_options.is_high_priority_stream, pg_options.config.max_ctas))
        assert pg_options._timeout == timeout
        assert getattr(pg_options, "lazy_init", True)
        return mock.Mock()

    monkeypatch.setattr(groups, "EDGE_CTAS", 2)
    with (
        mock.patch.multiple(dist, new_group=new_group, get_backend=lambda group=None: "nccl", get_rank=lambda: 0),
    ):
        replica, edge = list(range(6)), (0, 1, Channel.ACTIVATION)
        PipelineGroups.create([replica], [edge], timedelta(minutes=7), tensor_size=2, vocab_members=(0, 2))
    stages, pipelines, members, edges = (
        [(0, 1), (2, 3), (4, 5)], [(0, 2, 4), (1, 3, 5)], [(0, 4), (1, 5)], [(0, 2), (1, 3)]
    )  # fmt: skip
    whole = [(ranks, True, CTAS) for ranks in (*stages, *pipelines, *members)]
    assert sorted(made) == sorted([*whole, *((ranks, True, 2) for ranks in edges)])


def splits_of_the_world(rank: int, world: int, size: int, lazy: bool) -> tuple[int, list[tuple[int, ...]]]:
    """How often rank 0 of `size` takes part in a split of the world for groups of others, and its own groups.

    PyTorch's own code decides; stubbed are the communicator that would be split, and the groups that this rank is in.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pipelines = size // 8
    replicas = [range(first, size, pipelines) for first in range(pipelines)]
    edges = [(stage, stage + 1, Channel.ACTIVATION) for stage in range(7)]
    edges += [(stage + 1, stage, Channel.GRADIENT) for stage in range(7)]
    own, source, helper = [], mock.Mock(), distributed_c10d._new_process_group_helper

    def made(group_size, group_rank, ranks, *others, backend_options=None, **named):
        if backend_options is None:  # The processes' own group, of gloo, splits nothing.
            return mock.Mock(), None
        if 0 in ranks:
            own.append(tuple(ranks))
            return mock.Mock(), None
        backend_options.lazy_init &= lazy
        return helper(group_size, group_rank, ranks, *others, backend_options=backend_options, **named)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # as PyTorch 2.15 binds it by itself
    with (
        mock.patch.object(distributed_c10d, "_new_process_group_helper", made),
        mock.patch.object(distributed_c10d, "_get_split_source", lambda *_: source),
        mock.patch.object(dist, "get_backend", lambda group=None: "nccl"),
        mock.patch.object(groups, "Communicator"),
    ):
        found = PipelineGroups.create(replicas, edges)
    dist.destroy_process_group()
    assert in_use(found) == len(own)
    return source.perform_nocolor_split.call_count, own


@pytest.mark.skipif(
    not dist.is_nccl_available() or not hasattr(dist.ProcessGroupNCCL.Options(), "lazy_init"),
    reason="PyTorch without NCCL, or one that makes communicators at their first use anyway",
)
@pytest.mark.parametrize("size", [8, 64, 1024])
def test_no_group_is_a_collective_of_the_whole_world(size):
    ((splits, own),) = run_ranks(1, splits_of_the_world, size, True, timeout=60)
    assert splits == 0
    assert len(own) == 3  # the pipeline's, and this end's two edges
    ((splits, _),) = run_ranks(1, splits_of_the_world, size, False, timeout=60)
    assert splits == size // 8 * 15 - 3


def in_use(groups: PipelineGroups) -> int:
    """How many communicators a rank uses in a schedule. NCCL creates none for an unused group."""
    takes_part = groups.vocabulary is not None
    return takes_part + len(groups.edges) + (takes_part and groups.tensor is not None)
