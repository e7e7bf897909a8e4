"""Test bytes, instructions and products of S and T in this project's kernels against values computed by hand."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evidence.roofline import Line, bound, lines, markdown
from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import HARDWARE, Rates
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.cost.ranks.vocab_kernels import (
    ADD_LAUNCHES,
    ISSUE_SHARE,
    LAUNCH,
    LONG_ROW_INSTRUCTIONS,
    LONGEST_ROW,
    RESCALE_INSTRUCTIONS,
    WHOLE_ROW_INSTRUCTIONS,
    ShardPasses,
)
from megatron_vp.schedule import VocabMethod

RATES = Rates(gemm=1e15, fp8_gemm=2e15, copy=1e12, issue=1e13)
MODEL = ModelShape(layers=16, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=16, pipeline=4)
ONE, TWO = VocabMethod.VOCAB_1, VocabMethod.VOCAB_2


def shard(tokens=2048, rows=8192, hidden=4096, **changes):
    return ShardPasses(RATES, tokens, rows, hidden, **changes)


def test_products_take_their_arithmetic_or_their_operands():
    assert shard().gemm() == shard(gradient_bytes=0).weight_gemm() == 2 * 2048 * 8192 * 4096 / 1e15
    assert shard().weight_gemm() == (2 * (2048 * 4096 + 2048 * 8192) + 8 * 8192 * 4096) / 1e12
    few = shard(tokens=16)
    assert few.gemm() == 2 * (16 * 4096 + 8192 * 4096 + 16 * 8192) / 1e12
    assert few.weight_gemm() == (2 * (16 * 4096 + 16 * 8192) + 8 * 8192 * 4096) / 1e12
    assert shard(tokens=16, gradient_bytes=2).weight_gemm() == (2 * (16 * 4096 + 16 * 8192) + 4 * 8192 * 4096) / 1e12


@pytest.mark.parametrize(("rows", "moved", "instructions"), [(8192, 4, 16), (32768, 4, 16), (32769, 6, 13)])
def test_the_softmax_reads_short_rows_once_and_long_ones_twice(rows, moved, instructions):
    found = shard(rows=rows).softmax()
    assert found.memory == pytest.approx(moved * 2048 * rows / 1e12)
    assert found.issue == pytest.approx(instructions * 2048 * rows / (1e13 * ISSUE_SHARE))
    assert found.seconds == LAUNCH + max(found.memory, found.issue)


def test_the_instructions_are_those_of_the_compiled_kernels():
    counts = Path(__file__).parents[1] / "vocab" / "data" / "kernel_counts.csv"
    found = {True: [], False: []}
    for row in csv.DictReader(counts.read_text().splitlines()):
        full = int(row["width"]) % 4096 == 0  # other widths issue a mask as well, up to 17
        kind = row["kernel"], row["capability"], row["dtype"], row["smoothed"]
        if full and kind == ("_exponentiate", "90", "bfloat16", "False"):
            found[int(row["width"]) <= LONGEST_ROW].append(float(row["per_element"]))
    assert 0.9 * WHOLE_ROW_INSTRUCTIONS < max(found[True]) <= WHOLE_ROW_INSTRUCTIONS
    assert 0.8 * LONG_ROW_INSTRUCTIONS < max(found[False]) <= LONG_ROW_INSTRUCTIONS


def test_what_bounds_a_kernel():
    assert bound(shard().softmax()) == "memory"
    busy = replace(RATES, issue=1e12)
    assert bound(replace(shard(), rates=busy).softmax()) == "issue"
    assert bound(shard(tokens=1).softmax()) == "launch"


def test_both_methods_do_the_same_work_in_other_passes():
    passes = shard()
    one, two = passes.output(ONE), passes.output(TWO)
    early = passes.gemm() + passes.scaled_rows(RESCALE_INSTRUCTIONS)
    assert one == pytest.approx((passes.gemm() + passes.softmax().seconds, two[1] + early))
    assert two[0] == pytest.approx(one[0] + early) and sum(one) == pytest.approx(sum(two))
    assert two[1] == passes.weight_gemm() + LAUNCH + 4 * 2048 * 4096 / 1e12


def test_ranks_share_the_rows_of_the_words():
    looked_up, added = shard().embedding(shards=8)
    assert looked_up == pytest.approx(LAUNCH + 4 * 2048 * 4096 / 8 / 1e12)
    assert added == pytest.approx(ADD_LAUNCHES * LAUNCH + 10 * 2048 * 4096 / 8 / 1e12)


def test_the_model_charges_this_projects_kernels_where_it_knows_the_gpu():
    known, unknown = (PassTimes(JOB, gpu) for gpu in (HARDWARE["h100"], HARDWARE["mi300x"]))
    counted = ShardPasses(HARDWARE["h100"].rates, 2048, JOB.shard_rows, 2048)
    assert known.output_shard(TWO) == counted.output(TWO) and known.embedding_shard() == counted.embedding(4)
    assert sum(known.output_shard(TWO)) < sum(known.eager_output_shard(TWO))
    assert unknown.output_shard(TWO) == unknown.eager_output_shard(TWO) and unknown.placed_rows() == 0
    narrow = PassTimes(replace(JOB, wide_gradients=False), HARDWARE["h100"])
    assert narrow.own_kernels().gradient_bytes == 2


def test_layers_and_shards_multiply_at_the_same_rate():
    times = PassTimes(JOB, HARDWARE["h100"])
    assert times.whole_output().F > 2 * 2048 * 2048 * 131072 / 700e12
    slower = replace(HARDWARE["h100"], rates=replace(HARDWARE["h100"].rates, gemm=350e12))
    assert PassTimes(JOB, slower).layer().F > 1.5 * times.layer().F


@pytest.mark.parametrize(
    ("gpu", "tokens", "rows", "ratios"),
    [
        ("h100", 2048, 8192, (1.17, 1.13, 1.08)),
        ("h200", 2048, 8192, (1.12, 1.09, 1.06)),
        ("h100", 4096, 32768, (1.15, 1.12, 1.08)),
        ("h200", 4096, 32768, (1.11, 1.08, 1.05)),
    ],
)
def test_s_over_its_product_is_what_was_worked_out_by_hand(gpu, tokens, rows, ratios):
    found = [line.s_over_gemms(ONE) for line in lines((tokens,), (rows,), gpus=(gpu,))]
    assert found == pytest.approx(ratios, abs=0.006)


def test_every_product_of_the_roofline_is_bound_by_the_tensor_cores():
    for line in lines():
        passes = line.passes
        assert (
            passes.gemm() == passes.weight_gemm() == 2 * passes.tokens * passes.rows * passes.hidden / passes.rates.gemm
        )
        assert 1 < line.s_over_gemms(TWO) < line.s_over_gemms(ONE) < 1.25 and 1 < line.t_over_gemms(TWO) < 1.12


def test_a_line_is_a_row_of_the_table():
    table = markdown([Line("h100", shard())]).splitlines()
    assert len(table) == 3 and table[2].startswith("| 2048 x 8192 | 4096 | H100 | 137 | 67.1 | 35.8 | memory |")


@pytest.mark.parametrize(
    ("gpu", "words", "name"),
    [("h200", "are estimated from the bytes", "counted"), ("cpu", "assume the paper's eager code", "paper")],
)
def test_answers_say_whose_passes_they_charge(gpu, words, name):
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --vocab-parallel"
    )
    arguments = ["simulate", *flags.split(" "), "--hardware", gpu]
    assert f"The times of the vocabulary passes S and T {words}" in CliRunner().invoke(app, arguments).stdout
    document = json.loads(CliRunner().invoke(app, [*arguments, "--format", "json"]).stdout)
    assert document["vocabulary_passes"] == name
