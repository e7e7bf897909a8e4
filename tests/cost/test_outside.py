"""Test memory outside PyTorch's count on every rank against values computed by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.ranks.outside import (
    COMMUNICATOR,
    CONNECTION,
    CONTEXT,
    KERNELS,
    MEGATRON_CHANNELS,
    outside_memory,
)
from megatron_vp.runtime.groups import CTAS, EDGE_CTAS
from megatron_vp.schedule import Channel, Placement, generate
from megatron_vp.schedule.transfers import CHANNELS, all_edges

H100 = HARDWARE["h100"]
MODEL = ModelShape(layers=16, hidden=64, heads=4, ffn=256, vocab=1000)
JOB = Job(MODEL, sequence=32, micro_batch=1, microbatches=4, pipeline=4)
OURS, MEGATRONS = CHANNELS * CONNECTION, MEGATRON_CHANNELS * CONNECTION
RING, MEGATRONS_RING = COMMUNICATOR + 2 * OURS, COMMUNICATOR + 2 * MEGATRONS


def outside(rank, job=JOB, name="1f1b", vocab="vocab-2", hardware=H100):
    """Bytes beyond the context and the kernels."""
    schedule = generate(name, job.pipeline, 4, vocab=vocab)
    return outside_memory(job, schedule, rank, hardware) - CONTEXT - KERNELS * hardware.is_gpu


def test_the_channels_are_those_that_the_runtime_asks_for():
    assert CHANNELS == CTAS == EDGE_CTAS


def test_edges_of_a_chain_a_v_and_a_circle():
    forward, back = Channel.ACTIVATION, Channel.GRADIENT
    assert all_edges(Placement.round_robin(3), True) == {(0, 1, forward), (1, 2, forward), (1, 0, back), (2, 1, back)}
    # In a V both chunks of two ranks join them: an edge each way for each kind of message. The turn stays on its rank.
    both = {(0, 1, forward), (1, 0, back), (1, 0, forward), (0, 1, back)}
    assert all_edges(Placement.v_shape(2), True) == both
    tie = {(1, 0, Channel.LABELS), (0, 1, Channel.TOKEN_LOSS), (1, 0, Channel.TOKEN_GRADIENT)}
    assert all_edges(Placement.v_shape(2), False) == both | tie
    assert (2, 0, forward) in all_edges(Placement.round_robin(3, 2), True)


def test_a_pipeline_in_one_node():
    megatron = 2 * MEGATRONS_RING  # all ranks, and those of the replica
    # Rank 0 receives gradients alone, rank 1 activations too. The sender of an edge inside a node has no buffers.
    assert outside(0) == pytest.approx(megatron + 2 * COMMUNICATOR + OURS + RING + 3 * OURS)
    assert outside(1) == pytest.approx(megatron + 4 * COMMUNICATOR + 2 * OURS + RING + OURS)
    assert outside(0, hardware=HARDWARE["cpu"]) == 0
    members = generate("1f1b", 5, 4, vocab="vocab-2", vocab_ranks=(1, 2))
    apart = outside_memory(replace(JOB, pipeline=5), members, 3, H100) - CONTEXT - KERNELS
    assert apart == pytest.approx(megatron + 4 * COMMUNICATOR + 2 * OURS)


def test_more_ranks_of_any_kind_take_more_and_edges_between_nodes_take_both_ends():
    assert outside(1, replace(JOB, data=2)) - outside(1) == pytest.approx(MEGATRONS_RING)
    assert outside(1, replace(JOB, tensor=2)) - outside(1) == pytest.approx(MEGATRONS_RING + RING)
    # Eight GPUs a stage: every stage is a node of its own.
    assert outside(0, replace(JOB, data=8)) - outside(0) == pytest.approx(MEGATRONS_RING + OURS)


def test_megatrons_own_schedule_has_its_own_connections_and_none_of_ours():
    first, second = (outside(rank, vocab="none") for rank in (0, 1))
    assert first == pytest.approx(2 * MEGATRONS_RING + MEGATRONS)
    assert second - first == pytest.approx(MEGATRONS)
    tied = replace(JOB, model=replace(MODEL, tied=True))
    assert outside(0, tied, vocab="none") - first == pytest.approx(MEGATRONS_RING)
    assert outside(1, tied, vocab="none") == second
