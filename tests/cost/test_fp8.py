"""Test predictions with fp8 layers: bytes moved and kept by each recipe, 16-bit parts, and the effect on the gain."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.fp8 import cast_bytes, gathered_share, quantised, refuse_fp8
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.layer_operations import operations
from megatron_vp.cost.layers.layer_types import stage_layers
from megatron_vp.cost.layers.shapes import Fp8Recipe, Job, ModelShape, Plan
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod

H100, B200 = HARDWARE["h100"], HARDWARE["b200"]
CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = ModelShape(layers=16, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=16, pipeline=4, fp8=Fp8Recipe.TENSORWISE)
WIDE = replace(JOB, fp8=None)
TINY = {
    **{"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500, "seq_length": 32},
    **{"micro_batch_size": 2, "bf16": True, "pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("recipe", "gpu", "moved", "weight", "inputs"),
    [
        ("tensorwise", H100, 6, 2, 1),
        ("delayed", H100, 4, 2, 1),
        ("tensorwise", B200, 5, 1, 1),
        ("delayed", B200, 3, 1, 1),
        ("blockwise", H100, 4 + 2 / 32, 2 + 2 / 32, 1 + 1 / 32),
        ("mxfp8", B200, 4 + 2 / 32, 2 + 2 / 32, 1 + 1 / 32),
    ],
)
def test_bytes_of_an_element(recipe, gpu, moved, weight, inputs):
    found = quantised(Fp8Recipe(recipe), gpu)
    assert (found.moved, found.kept, found.columns or found.rows) == pytest.approx((moved, weight, inputs))


@pytest.mark.parametrize(
    ("recipe", "tensor", "up", "down"),
    [
        ("tensorwise", 1, (6, 6), (6, 6)),
        ("tensorwise", 4, (5 / 4 + 2, 6), (6, 5 / 4 + 2)),  # quantised before the gather, transposed after it
        ("delayed", 1, (2 - 1, 4), (4, 4)),  # the norm writes fp8: one byte less, and only the transpose remains
        ("delayed", 4, (2 - 1 / 4, 4), (4, 3 / 4 + 2)),
        ("blockwise", 4, ((4 + 2 / 32) / 4, 4 + 2 / 32), (4 + 2 / 32, (4 + 2 / 32) / 4)),
    ],
)
def test_a_gathered_tensor_is_quantised_before_the_gather(recipe, tensor, up, down):
    job = replace(JOB, fp8=Fp8Recipe(recipe), tensor=tensor, sequence_parallel=tensor > 1)
    found = {op.name: op for op in operations(job) if op.matrix}
    for name, each in (("up", up), ("down", down)):
        matrix = found[name].matrix
        sizes = matrix.tokens * matrix.inputs, matrix.tokens * matrix.outputs
        moved = [count / size for count, size in zip(cast_bytes(job, found[name], H100), sizes, strict=True)]
        assert moved == pytest.approx(each)
    assert gathered_share(job, found["down"]) == (0.75 if tensor > 1 else 1)


def test_small_products_in_fp8_wait_for_half_the_operands_and_the_whole_result():
    times = PassTimes(replace(JOB, sequence=8), H100)
    matrix = next(op.matrix for op in operations(times.job) if op.matrix)
    assert times.gemm_time(matrix, Fp8Recipe.TENSORWISE) == pytest.approx(
        times.memory_time(8 * (2048 + 2 * 6144) + 2048 * 6144)
    )


@pytest.mark.parametrize(
    ("start", "end", "layers", "wide"),
    [
        (1, 1, (4, 4, 4, 4), (1, 0, 0, 1)),
        (3, 2, (2, 2, 2, 1, 1), (2, 1, 0, 1, 1)),
        (0, 0, (4, 4), (0, 0)),
        (4, 4, (5,), (5,)),
        (0, 1, (4, 0), (1, 0)),
    ],
)
def test_layers_that_stay_in_16_bits_are_the_first_and_last_of_the_model(start, end, layers, wide):
    def found(job):
        return tuple(each["t'"] for each in stage_layers(job, layers))

    assert found(replace(JOB, bf16_at_start=start, bf16_at_end=end)) == wide
    assert not any(found(replace(WIDE, bf16_at_start=start)))


def test_stages_with_layers_in_16_bits_take_longer():
    job = replace(JOB, bf16_at_start=1, bf16_at_end=1)
    costs, even = (predict(each, Plan("v-half", VocabMethod.VOCAB_1), H100.alike).timeline.costs for each in (job, JOB))
    times = PassTimes(JOB, H100)
    assert costs.F[0] - even.F[0] == pytest.approx(times.layer("t'").F - times.layer().F)
    assert costs.W[7] - even.W[7] == pytest.approx(times.layer("t'").W - times.layer().W)
    assert costs.F[1:7] == even.F[1:7]


def test_flags_and_megatrons_own_names_say_the_same():
    asked = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    job = job_of(TINY | asked | {"num_layers_at_end_in_bf16": 2})
    assert (job.fp8, job.bf16_at_start, job.bf16_at_end) == (Fp8Recipe.TENSORWISE, 1, 2)
    assert job_of(TINY | {"fp8": "e4m3"}).fp8 is Fp8Recipe.DELAYED
    assert job_of(TINY | {"fp8_recipe": "mxfp8"}).fp8 is None  # the format is what switches it on
    none = job_of(TINY | {"fp8": "e4m3", "fp8_recipe": "blockwise", "num_layers_at_start_in_bf16": 3})
    assert (none.bf16_at_start, none.bf16_at_end) == (0, 0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"fp8_format": "hybrid", "fp8_recipe": "custom"}, "fp8_recipe 'custom' are unknown"),
        ({"fp8_format": "hybrid", "first_last_layers_bf16": True}, "cannot be combined with fp8_recipe delayed"),
    ],
)
def test_bad_fp8_arguments_are_one_line(asked, words):
    with pytest.raises(UserError, match=words):
        job_of(TINY | asked)


@pytest.mark.parametrize(("gpu", "recipe"), [("a100", "delayed"), ("cpu", "delayed"), ("h200", "mxfp8")])
def test_hardware_without_the_recipe_is_refused(gpu, recipe):
    with pytest.raises(UserError, match=gpu):
        refuse_fp8(replace(JOB, fp8=Fp8Recipe(recipe)), HARDWARE[gpu])
    refuse_fp8(WIDE, HARDWARE[gpu])


def test_simulate_takes_the_jobs_fp8_flags():
    flags = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 100000 --bf16 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --format json"
    )

    def answer(more=""):
        return CliRunner().invoke(app, ["simulate", *flags.split(), *more.split()])

    wide, narrow = (json.loads(answer(more).stdout) for more in ("", "--fp8-format hybrid --fp8-recipe=tensorwise"))
    assert (wide["fp8_recipe"], narrow["fp8_recipe"]) == (None, "tensorwise")
    assert narrow["plan"]["iteration_seconds"] < wide["plan"]["iteration_seconds"]
    error = answer("--fp8-format hybrid --hardware a100").exception
    assert isinstance(error, UserError) and "no fp8 rates are known for --hardware a100" in str(error)
