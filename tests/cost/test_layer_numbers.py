"""Test which layers the stages have."""

from dataclasses import replace

import pytest

from megatron_vp.cost.layers.layer_types import model_layers, stage_layers
from megatron_vp.cost.layers.shapes import Fp8Recipe, Job, ModelShape
from megatron_vp.cost.planning.layer_division import divided
from megatron_vp.jobs.layout_text import layers_in, stages_behind_mtp
from megatron_vp.jobs.virtual_stages import ENDS, chunks_asked
from megatron_vp.schedule import Placement

MODEL = ModelShape(layers=6, hidden=64, heads=4, ffn=256, vocab=512)
JOB = Job(MODEL, sequence=64, micro_batch=1, microbatches=4, pipeline=3)


@pytest.mark.parametrize(
    ("placement", "layers", "may_be_empty", "extra", "found"),
    [
        (Placement.round_robin(4), 7, (), None, (1, 2, 2, 2)),
        (Placement.round_robin(4, 2), 12, (), None, (2, 1, 2, 1, 1, 2, 1, 2)),
        (Placement.v_shape(2), 6, (), None, (2, 1, 2, 1)),
        (Placement.round_robin(2, 2), 6, (0, 3), None, (1, 2, 2, 1)),
        (Placement.round_robin(3), 7, (0, 2), [0.5, 0.0, 2.2], (3, 3, 1)),
    ],
)
def test_layers_that_do_not_divide_are_shared_out(placement, layers, may_be_empty, extra, found):
    assert divided([1.0] * layers, placement, extra, may_be_empty) == found


def test_heads_are_no_layers_of_a_stage_but_of_the_model():
    layout = "Ett|tt|m|L"
    assert layers_in(layout) == (2, 2, 0, 0) and stages_behind_mtp(layout) == 1
    model = replace(MODEL, mtp_heads=("t",), behind_mtp=1)
    assert model_layers(replace(JOB, model=model)) == {"t": 7, "m": 1}
    found = stage_layers(replace(JOB, model=model), (2, 2, 2))
    assert [stage["t"] for stage in found] == [2, 3, 2]


def test_layers_in_16_bits_are_counted_from_the_ends_of_the_model():
    job = replace(JOB, fp8=Fp8Recipe.TENSORWISE, bf16_at_start=1, bf16_at_end=3)
    assert [stage["t'"] for stage in stage_layers(job, (2, 2, 2))] == [1, 1, 2]


def test_vocabulary_layers_that_count_as_layers_count_for_the_number_of_chunks():
    job = {"num_layers": 14, "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2}
    assert chunks_asked(job) == 1 and chunks_asked(job | dict.fromkeys(ENDS, True)) == 2
