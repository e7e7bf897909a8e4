"""Test attention times against published ones, and the effect of windows, narrow heads and older kernels."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.layer_operations import operations
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.ranks.pass_times import attention_times
from megatron_vp.jobs.layer_kind import LayerKind

H100 = HARDWARE["h100"]
MODEL = ModelShape(layers=8, hidden=2048, heads=16, ffn=8192, vocab=1000)
PUBLISHED = {  # arXiv 2407.08608, heads of 128, causal forward, TFLOP/s: cuDNN 9, FlashAttention 3, FlashAttention 2
    2048: (484, 521, 298),
    4096: (518, 579, 319),
    8192: (529, 602, 333),
    16384: (539, 616, 335),
}


def job(sequence=4096, model=MODEL, **changes):
    return Job(model, sequence, 1, microbatches=1, pipeline=1, layers=LayerKind.ENGINE, **changes)


def attention_flops(one):
    return sum(op.scores for op in operations(one))


def times(one, hardware=H100):
    return attention_times(one, hardware, attention_flops(one))


@pytest.mark.parametrize("sequence", PUBLISHED)
def test_rates_are_published_ones(sequence):
    newest, old = job(sequence), job(sequence, flash_attention_2=1.0)
    flops = attention_flops(newest) / 2
    cudnn, third, second = PUBLISHED[sequence]
    assert flops / times(newest)[0] / 1e12 == pytest.approx((cudnn + third) / 2, rel=0.03)
    assert flops / times(old)[0] / 1e12 == pytest.approx(second, rel=0.04)
    assert times(old)[1] > 1.5 * times(newest)[1]
    either = times(job(sequence, flash_attention_2=0.5))
    for each, one, other in zip(either, times(old), times(newest), strict=True):
        assert each == pytest.approx((one + other) / 2)


def test_narrow_heads_are_slower_and_each_context_rank_sees_shorter_pieces():
    """Published at 16384: 497 for heads of 64, 648 of 128, no mask."""
    narrow = replace(MODEL, heads=32, head_size=64)
    assert times(job(16384))[0] / times(job(16384, narrow))[0] == pytest.approx(497 / 648, rel=0.05)
    assert times(job(16384, replace(MODEL, heads=8, kv_groups=8, head_size=256))) == times(job(16384))
    assert times(job(16384))[0] < 2 * times(job(16384, context=2))[0] < 1.03 * times(job(16384))[0]
