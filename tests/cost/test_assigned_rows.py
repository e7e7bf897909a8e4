"""Test vocabulary shards of any size in the cost model: times and memory follow each rank's rows."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.planning.stage_costs import order_costs
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod

H100 = find_hardware("h100")
TWO = VocabMethod.VOCAB_2
MODEL = ModelShape(layers=8, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=8, pipeline=4)
ALIKE = H100.alike
"""All ranks are equally fast, however busy they are."""
ROWS = (65536, 40960, 24576, 0)


def assigned(rows=ROWS, **changes):
    return predict(replace(JOB, **changes), Plan(vocab=TWO, vocab_rows=rows), ALIKE)


@pytest.mark.parametrize("tensor", [1, 2])
def test_vocabulary_passes_take_what_the_rows_of_their_rank_take(tensor):
    job = replace(JOB, tensor=tensor)
    costs = assigned(tensor=tensor).timeline.costs
    for rank in range(4):
        own = PassTimes(job, H100).vocabulary_passes(TWO, ROWS[rank] // tensor)
        assert (costs.S[rank], costs.T[rank], costs.IF[rank], costs.IB[rank]) == pytest.approx(own)
    assert costs.S[3] == costs.T[3] == costs.IF[3] == costs.IB[3] == 0
    assert costs.S[0] > 1.5 * costs.S[1] > 2 * costs.S[2] > 0


def test_even_rows_cost_what_even_shards_cost():
    even = predict(JOB, Plan(vocab=TWO), ALIKE)
    same = assigned((32768,) * 4)
    for kind, values in even.timeline.costs.named().items():
        assert same.timeline.costs.named()[kind] == pytest.approx(values)
    assert [rank.parts() for rank in same.memory] == [rank.parts() for rank in even.memory]


def test_memory_follows_the_rows():
    found, even = assigned().memory, predict(JOB, Plan(vocab=TWO), H100).memory
    rows = 2 * 2048  # both layers, bytes per parameter below
    for rank in range(4):
        more = ROWS[rank] - 32768
        assert found[rank].parameters - even[rank].parameters == 2 * rows * more
        assert found[rank].gradients - even[rank].gradients == 4 * rows * more
        assert found[rank].optimizer - even[rank].optimizer == 12 * rows * more
    assert found[0].vocabulary - even[0].vocabulary == 6 * 2048 * 32768
    assert assigned((65536, 65536, 0, 0)).memory[2].vocabulary == 0  # not a member of any collective
    assert found[3].vocabulary > 0  # the last stage has X and its gradient


def test_the_order_is_made_for_every_ranks_own_costs_at_equal_speed():
    costs = order_costs(JOB, Plan(vocab=TWO, vocab_rows=ROWS), H100)
    assert all(value == round(value) for values in costs.named().values() for value in values)
    assert costs.S[0] > costs.S[1] > costs.S[2] > costs.S[3] == 0
    assert sum((*costs.F, *costs.B, *costs.W)) == pytest.approx(400, abs=6)
    assert costs.F[1] == costs.F[2] == costs.F[3]


def test_rows_that_are_no_cut_are_refused():
    for rows, words in (
        ((65536, 65536), "gives rows for 2 pipeline ranks, but the pipeline has 4"),
        ((65536, 65536, 128, 0), "adds up to 131200 rows, but the padded vocabulary has 131072: remove 128"),
        ((65536 * 2, 128, -128, 0), "negative number of rows"),
    ):
        with pytest.raises(UserError, match=words):
            assigned(rows)
    with pytest.raises(UserError, match="cannot be divided equally among the 2 tensor ranks"):
        assigned((65535, 65537, 0, 0), tensor=2)
    with pytest.raises(UserError, match="vocab method interlaced"):
        predict(JOB, Plan("interlaced", VocabMethod.INTERLACED, vocab_rows=ROWS), H100)
    assert Plan(vocab=TWO, vocab_rows=ROWS).rows_by_rank(JOB) == ROWS and Plan().rows_by_rank(JOB) is None
