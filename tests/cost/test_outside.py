"""Test the communicators of every rank, and memory outside PyTorch's count, against values computed by hand."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.ranks.outside import (
    CONNECTION,
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
FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 100000 "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 --vocab-parallel"
)


def outside(rank, job=JOB, name="1f1b", vocab="vocab-2", moving=0.0, hardware=H100):
    return outside_memory(job, generate(name, job.pipeline, 4, vocab=vocab), rank, moving, hardware)


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


@pytest.mark.parametrize(
    ("name", "vocab", "tensor", "counts"),
    [
        ("1f1b", "vocab-2", 1, [2 + 1, 4 + 1, 4 + 1, 2 + 1]),
        ("1f1b", "vocab-2", 2, [2 + 2, 4 + 2, 4 + 2, 2 + 2]),
        ("v-half", "vocab-2", 1, [4 + 1, 8 + 1, 8 + 1, 4 + 1]),
        ("v-half", "none", 1, [4 + 3 + 1, 8, 8, 4 + 3 + 1]),
        ("interleaved", "vocab-2", 1, [4 + 1] * 4),
    ],
)
def test_every_rank_has_a_communicator_for_each_edge_and_one_for_each_group(name, vocab, tensor, counts):
    assert [outside(rank, replace(JOB, tensor=tensor), name, vocab).communicators for rank in range(4)] == counts


def test_members_alone_join_and_rows_come_from_holders():
    schedule = generate("1f1b", 5, 4, vocab="vocab-2", vocab_ranks=(1, 2))
    found = [outside_memory(replace(JOB, pipeline=5, tensor=2), schedule, rank, 0.0, H100) for rank in range(5)]
    assert [each.communicators for each in found] == [2 + 2, 4 + 2, 4 + 2, 4, 2 + 2]
    assert [each.rows / OURS for each in found] == pytest.approx([2, 1, 1, 0, 0])


def test_simulate_shows_the_parts_and_the_communicators():
    flags = FLAGS.split()
    shown = CliRunner().invoke(app, ["simulate", *flags]).stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows[4:]] == ["3", "5", "5", "3"]
    document = json.loads(CliRunner().invoke(app, ["simulate", *flags, "--format", "json"]).stdout)["plan"]
    assert document["communicators"] == [3, 5, 5, 3]
    for held, parts in zip(document["memory_bytes"], document["outside_bytes"], strict=True):
        assert held["outside"] == pytest.approx(sum(parts.values()))
        assert set(parts) == {"context", "kernels", "edges", "vocabulary", "rows", "megatron", "fragments"}
    fullest = max(sum(held.values()) for held in document["memory_bytes"])
    assert document["peak_memory_bytes"] == pytest.approx(fullest)
