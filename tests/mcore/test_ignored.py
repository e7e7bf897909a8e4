"""Test options without effect under our schedules: each gives one warning, on one rank, only if it was requested."""

import argparse
import warnings

import pytest

from megatron_vp.mcore import settled
from megatron_vp.mcore.options.ignored import IGNORED, warn_of_ignored

ASKED = {
    "cross_entropy_loss_fusion": True,
    "microbatch_group_size_per_vp_stage": 4,
    "overlap_p2p_comm_warmup_flush": True,
    "use_ring_exchange_p2p": True,
    "pipeline_model_parallel_comm_backend": "nccl",
    "overlap_p2p_comm": False,
    "high_priority_stream_groups": ["ep", "pp"],
    "defer_embedding_wgrad_compute": True,
    "save_dgrads_interval": 10,
    "account_for_loss_in_pipeline_split": True,
}
BESIDE_LOCAL_LAYERS = IGNORED[-1]
UNASKED = dict.fromkeys(ASKED) | {
    **{"overlap_p2p_comm": True, "virtual_pipeline_model_parallel_size": 2, "high_priority_stream_groups": []},
    **{"save_activations_interval": None, "account_for_embedding_in_pipeline_split": False},
    **{"moe_grouped_gemm": False, "transformer_impl": "local"},
}
FOR_VOCABULARY_PASSES = ("cross_entropy_loss_fusion", "save_dgrads_interval", "account_for_loss_in_pipeline_split")


def warned(rank=0, vocab_parallel=False, pipeline_schedule="1f1b", **options):
    args = argparse.Namespace(
        rank=rank,
        vocab_parallel=vocab_parallel,
        pipeline_schedule=pipeline_schedule,
        offload_chunks="0",
        **UNASKED | options,
    )
    settled.note_words(settled.Words(options={name: f"--{name}" for name in options}))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_ignored(args)
    finally:
        settled.clear()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("name", "ignored"), list(zip(ASKED, IGNORED[:-1], strict=True)))
def test_an_option_without_effect_is_named_once(name, ignored):
    (said,) = warned(vocab_parallel=True, **{name: ASKED[name]})
    does = "unbalances the stages" if name.startswith("account_for") else "has no effect"
    assert said == f"{ignored.option} {does} with --pipeline-schedule 1f1b and --vocab-parallel: {ignored.why}"


def test_nothing_is_said_where_megatron_uses_the_option_or_on_other_ranks():
    assert warned(**ASKED) == [] == warned(vocab_parallel=True) == warned(rank=1, vocab_parallel=True, **ASKED)
    # The vocabulary layers are Megatron's own.
    assert len(warned(pipeline_schedule="zb-h1", **ASKED)) == len(ASKED) - len(FOR_VOCABULARY_PASSES)


def test_grouped_products_of_experts_are_said_to_need_other_layers_in_plain_runs_too():
    (said,) = warned(moe_grouped_gemm=True)
    assert said == f"--moe-grouped-gemm has no effect with --transformer-impl local: {BESIDE_LOCAL_LAYERS.why}"
    assert not warned(moe_grouped_gemm=True, transformer_impl="transformer_engine")
