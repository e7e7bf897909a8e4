"""Test the memory of a rank against values computed by hand, for short schedules."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.layouts import equal_layers
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.ranks.layer_memory import WORKING_SET, layer_memory
from megatron_vp.cost.ranks.rank_memory import (
    EMBEDDED,
    SCORES,
    SHARED_BUFFERS,
    WORKSPACES,
    MemoryModel,
)
from megatron_vp.schedule import generate

HIDDEN, ROWS = 64, 1008
MODEL = ModelShape(layers=4, hidden=HIDDEN, heads=4, ffn=4 * HIDDEN, vocab=ROWS)
JOB = Job(MODEL, sequence=32, micro_batch=1, microbatches=3, pipeline=2)
LAYER = 12 * HIDDEN**2 + 4 * HIDDEN


def kept_by(job):
    return layer_memory(job, HARDWARE["h100"], False).kept


def memory(job, name="1f1b", microbatches=3, vocab="none"):
    schedule = generate(name, 2, microbatches, vocab=vocab)
    return MemoryModel(job, schedule, equal_layers(job, schedule.placement.stages), HARDWARE["h100"])


@pytest.mark.parametrize(
    ("name", "vocab", "tied", "rows"),
    [
        ("1f1b", "none", False, (ROWS, ROWS)),
        ("1f1b", "none", True, (ROWS, ROWS)),
        ("v-half", "none", False, (2 * ROWS, 0)),
        ("1f1b", "vocab-2", False, (ROWS, ROWS)),
        ("v-half", "vocab-2", True, (ROWS / 2, ROWS / 2)),
    ],
)
def test_vocabulary_rows_are_where_their_layers_are(name, vocab, tied, rows):
    found = memory(replace(JOB, model=replace(MODEL, tied=tied)), name, vocab=vocab)
    assert [found.parameters(rank) for rank in range(2)] == [2 * LAYER + count * HIDDEN for count in rows]


def test_a_distributed_optimizer_is_shared_by_all_replicas_and_gradients_are_as_wide_as_they_are_accumulated():
    found = memory(replace(JOB, data=2, context=2, distributed_optimizer=True))
    parameters = 2 * LAYER + ROWS * HIDDEN
    assert found.rank(0).gradients == 4 * parameters and found.rank(0).optimizer == 12 * parameters / 4
    narrow = replace(JOB, wide_gradients=False)
    assert memory(narrow, microbatches=40).rank(0).optimizer == 12 * parameters


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence_parallel": True}])
def test_a_plain_backward_holds_its_microbatches_one_layer_s_work_and_the_logits(parallel):
    job = replace(JOB, **parallel)
    ranks = job.tensor
    unit, kept = 32 * HIDDEN / ranks, 2 * kept_by(job)
    first, last = map(memory(job).rank, range(2))
    assert first.activations == pytest.approx(WORKSPACES + 2 * kept + WORKING_SET * unit) and first.vocabulary == 0
    assert last.activations == pytest.approx(WORKSPACES + kept + WORKING_SET * unit)
    assert last.vocabulary == SCORES * 32 * ROWS / ranks
    fused = memory(replace(job, cross_entropy="te")).rank(1)  # keeps 16 bits where others keep 32
    assert fused.vocabulary == 4 * 32 * ROWS / ranks
    assert first.communication == last.communication == 2 * 2 * unit


def test_split_vocabulary_layers_hold_a_microbatch_more_their_buffers_and_their_share_of_the_logits():
    first, last = map(memory(JOB, microbatches=4, vocab="vocab-2").rank, range(2))
    unit, kept = 32 * HIDDEN, 2 * kept_by(JOB)
    assert first.activations == pytest.approx(WORKSPACES + 3 * (kept + EMBEDDED * unit) + WORKING_SET * unit)
    assert last.activations == pytest.approx(WORKSPACES + 2 * kept + WORKING_SET * unit)
    assert first.vocabulary == last.vocabulary == SHARED_BUFFERS * unit + SCORES * 32 * ROWS / 2
