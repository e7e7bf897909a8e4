"""Options without effect under our schedules: one warning each, on one rank, where they are asked for in vain."""

import argparse
import warnings

import pytest

from megatron_vp.mcore.options.ignored import IGNORED, warn_of_ignored

ASKED = {
    "cross_entropy_loss_fusion": True,
    "microbatch_group_size_per_vp_stage": 4,
    "overlap_p2p_comm_warmup_flush": True,
    "use_ring_exchange_p2p": True,
    "pipeline_model_parallel_comm_backend": "nccl",
}
UNASKED = dict.fromkeys(ASKED)


def warned(rank=0, vocab_parallel=False, pipeline_schedule="1f1b", **options):
    args = argparse.Namespace(
        rank=rank, vocab_parallel=vocab_parallel, pipeline_schedule=pipeline_schedule, **UNASKED | options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored(args)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("name", "ignored"), list(zip(ASKED, IGNORED, strict=True)))
def test_an_option_without_effect_is_named_once(name, ignored):
    (said,) = warned(vocab_parallel=True, **{name: ASKED[name]})
    assert said == (f"{ignored.option} has no effect with --pipeline-schedule 1f1b and --vocab-parallel: {ignored.why}")


def test_nothing_is_said_where_megatron_uses_the_option_or_on_other_ranks():
    assert warned(**ASKED) == [] == warned(vocab_parallel=True) == warned(rank=1, vocab_parallel=True, **ASKED)
    assert len(warned(pipeline_schedule="zb-h1", **ASKED)) == len(ASKED) - 1  # its output layer is Megatron's own
