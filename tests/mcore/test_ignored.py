"""Test the warnings about options that have another effect than intended: one for each, only if it was requested."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.options import OPTIONS, UNREAD
from megatron_vp.mcore import settled
from megatron_vp.mcore.options.refusals import warnings_of
from megatron_vp.mcore.start.banner import describe_run
from megatron_vp.mcore.start.preflight import check_job
from tests.harness.training import tiny_model

ASKED = {
    "cross_entropy_loss_fusion": True,
    "microbatch_group_size_per_virtual_pipeline_stage": 4,
    "overlap_p2p_communication_warmup_flush": True,
    "use_ring_exchange_p2p": True,
    "pipeline_model_parallel_comm_backend": "nccl",
    "no_overlap_p2p_communication": True,
    "high_priority_stream_groups": ["ep", "pp"],
    "defer_embedding_wgrad_compute": True,
    "save_dgrads_interval": 10,
    "account_for_loss_in_pipeline_split": True,
}
SOUND = {
    **{"virtual_pipeline_model_parallel_size": 2, "transformer_impl": "local", "moe_aux_loss_coeff": 0.01},
    **{"data_parallel_size": 2, "pipeline_model_parallel_size": 2, "distributed_backend": "nccl"},
}
PER_TOKEN = {"calculate_per_token_loss": True, "eod_mask_loss": True}
DOCUMENTS = {"reset_attention_mask": True, "virtual_pipeline_model_parallel_size": None}
LATENT = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
SINKS = {"softmax_type": "learnable", "tensor_model_parallel_size": 2}
NORMS = {"log_params_norm": True, "overlap_param_gather": True}
TRAINS_SOMETHING_ELSE = [
    ({"moe_grouped_gemm": True}, {"transformer_impl": "transformer_engine"}),
    ({"context_parallel_size": 2, "eod_mask_loss": True}, {"calculate_per_token_loss": True}),
    ({"context_parallel_size": 2, "sft": True}, {"sft": False}),
    ({**PER_TOKEN, "mtp_num_layers": 1}, {"calculate_per_token_loss": False}),
    ({**PER_TOKEN, "num_experts": 4}, {"moe_router_load_balancing_type": "none"}),
    ({**PER_TOKEN, "num_experts": 4, "moe_aux_loss_coeff": [0.0, 0.01]}, {"moe_aux_loss_coeff": [0.0, 0.0]}),
    ({**PER_TOKEN, "num_experts": 4, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-3}, {"eod_mask_loss": False}),
    ({**DOCUMENTS, "transformer_impl": "transformer_engine"}, {"dataloader_inter_document_masking": True}),
    ({**DOCUMENTS, "pipeline_model_parallel_size": 4}, {"pipeline_model_parallel_size": 2}),
    (LATENT, {"transformer_impl": "transformer_engine"}),
    (SINKS, {"tensor_model_parallel_size": 1}),
    (NORMS, {"bf16": True}),
    ({"step_batch_size_schedule": "0:4 1K:8", "train_iters": 5}, {"train_iters": None}),
]
"""Jobs in which Megatron trains or logs something else, each with a change after which it does not."""
OF_OTHER_PROGRAMS = (
    *("bert_", "biencoder_", "block_data_path", "classes_fraction", "data_per_class_fraction", "dino_", "embedding_"),
    *("evidence_", "grpo_", "head_lr_mult", "ict_", "indexer_", "inference_", "iter_per_epoch", "langrl_", "mask_"),
    *("max_tokens_to_oom", "muon_", "num_channels", "num_classes", "output_bert", "query_", "retriever_", "rl_"),
    *("short_seq_prob", "swin_", "titles_", "use_legacy_static_engine", "use_one_sent_docs", "vision_"),
    *("deprecated_", "logits_load_", "per_dataset_sequences_path", "check_for_spiky"),
)
"""Prefixes of options for other models, RL, distillation and inference, of deprecated options that ask for the
default, and of Muon's options, which are looked up under names built at run time.
"""


def warned(vocab_parallel=False, pipeline_schedule="1f1b", **options):
    job = {"vocab_parallel": vocab_parallel, "pipeline_schedule": pipeline_schedule}
    settled.process.words = settled.Words(tuple(option_of(name) for name, value in options.items() if value))
    try:
        return list(warnings_of(Arguments(job | SOUND | options)))
    finally:
        settled.begin()


@pytest.mark.parametrize("name", ASKED)
def test_an_option_without_effect_is_named_once(name):
    (said,) = warned(vocab_parallel=True, **{name: ASKED[name]})
    does = "unbalances the stages" if name.startswith("account_for") else "has no effect"
    assert said.startswith(f"{option_of(name)}{' pp' * (name[:4] == 'high')} {does}"), said
    assert " with --pipeline-schedule 1f1b and --vocab-parallel: " in said


@pytest.mark.parametrize(("job", "mended"), TRAINS_SOMETHING_ELSE, ids=str)
def test_a_job_in_which_megatron_trains_something_else_is_warned_of_and_its_sound_neighbour_is_not(job, mended):
    (said,) = warned(**job)
    assert said == warned(vocab_parallel=True, **job)[0]
    assert warned(**job | mended) == []


def test_the_options_that_megatron_never_reads_are_those_of_the_table():
    """Search the sources of Megatron for each option of its parser. A release may start or stop reading one."""
    import megatron.core
    from megatron.training.arguments import add_megatron_arguments

    import pretrain_gpt_vp

    root, read = Path(megatron.core.__file__).parents[1], set()
    for file in [*root.rglob("*.py"), Path(pretrain_gpt_vp.__file__)]:
        text = file.read_text()
        read.update(re.findall(r"\.([a-z]\w*)\b(?!\s*=[^=])", text))
        if file.name != "arguments.py":
            read.update(re.findall(r"[\"']([a-z]\w+)[\"']", text))
    unread = {
        action.option_strings[0]: action.dest
        for action in add_megatron_arguments(argparse.ArgumentParser())._actions
        if action.dest not in read and not action.dest.startswith(OF_OTHER_PROGRAMS)
    }
    # Elsewhere, this name is a function or belongs to an inference context.
    table = {term.name for each in OPTIONS if each.run == UNREAD for way in each.ways for term in way}
    assert set(unread) == {option_of(name) for name in table - {"is_hybrid_model"}}
    assert not any(re.search(r"args\.is_hybrid_model\b", file.read_text()) for file in root.rglob("*.py"))


def test_an_option_that_megatron_never_reads_is_warned_of_and_changes_nothing_else():
    (said,) = warned(rampup_batch_size=[4, 4, 16])
    assert said == (
        "--rampup-batch-size has no effect, because no code of Megatron reads it: use --step-batch-size-schedule"
    )
    ramp = ["--rampup-batch-size", "2", "2", "8"]
    plain, grown = (
        describe_run(job, 2)
        for job in (
            check_job(["--cpu", *tiny_model(pipeline_model_parallel_size=2, vocab_parallel=True), *words], 2)
            for words in ([], ramp)
        )
    )
    assert [line for line in grown if "--rampup" not in line] == plain
