"""Test vocabulary shards of any size in the cost model: times and memory follow each rank's rows."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning.predict import predict
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
