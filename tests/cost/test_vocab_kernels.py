"""Test bytes, instructions and products of S and T in this project's kernels against values computed by hand."""

from evidence.roofline import Line, lines, markdown
from megatron_vp.cost.hardware.gpus import Rates
from megatron_vp.cost.ranks.vocab_kernels import (
    ShardPasses,
)
from megatron_vp.schedule import VocabMethod

RATES = Rates(gemm=1e15, fp8_gemm=2e15, copy=1e12, issue=1e13)
ONE, TWO = VocabMethod.VOCAB_1, VocabMethod.VOCAB_2


def shard(tokens=2048, rows=8192, hidden=4096, **changes):
    return ShardPasses(RATES, tokens, rows, hidden, **changes)


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
