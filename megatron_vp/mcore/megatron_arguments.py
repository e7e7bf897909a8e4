"""Lists the arguments of Megatron that each of our packages reads.

If a release of Megatron renames an argument, the job stops at startup with one line that names the argument and says
why we read it. Our own options are not listed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import RELEASE, TESTED_VERSIONS, Problem, present_series, present_version


@dataclass(frozen=True)
class Reads:
    """The Megatron arguments that one of our packages reads.

    `use` says why, as the end of the sentence "megatron_vp reads it ...".
    """

    use: str
    names: tuple[str, ...]


READ = {
    "mcore": Reads(
        "to choose the patches for a run, and to place model chunks on ranks",
        (
            *("fake_process_group", "heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path"),
            *("iterations_to_skip", "multiple_validation_sets", "override_opt_param_scheduler", "rank"),
            *("pipeline_model_parallel_layout", "pipeline_model_parallel_size", "tensorboard_dir", "transformer_impl"),
            *("use_checkpoint_opt_param_scheduler", "virtual_pipeline_model_parallel_size", "world_size"),
        ),
    ),
    "model": Reads(
        "to place and shard the model's layers",
        (
            *("distributed_timeout_minutes", "distributed_timeout_seconds_after_init", "fake_process_group"),
            *("hybrid_layer_pattern", "init_model_with_meta_device", "mtp_num_layers", "num_layers"),
            *("pipeline_model_parallel_layout", "pipeline_model_parallel_size", "tensor_model_parallel_size"),
            "virtual_pipeline_model_parallel_size",
        ),
    ),
    "options": Reads(
        "to refuse arguments that cannot work",
        (
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "adam_beta1"),
            *("adam_beta2", "adam_eps", "attention_dropout", "bf16", "ckpt_convert_format", "ckpt_format"),
            *("calculate_per_token_loss", "eod_mask_loss", "log_params_norm", "moe_aux_loss_coeff"),
            *("moe_router_load_balancing_type", "moe_z_loss_coeff", "overlap_param_gather"),
            *("clip_grad", "context_parallel_size", "create_attention_mask_in_dataloader", "cross_entropy_loss_fusion"),
            *("cuda_graph_impl", "cuda_graph_modules", "data_path"),
            *("dataloader_inter_document_masking", "defer_embedding_wgrad_compute", "delay_wgrad_compute"),
            *("distributed_backend", "distributed_timeout_minutes", "distributed_timeout_seconds_after_init"),
            *("eval_interval", "eval_iters", "eval_micro_batch_size", "exit_interval"),
            *("expert_gtp_weight_remat_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("fake_process_group", "ffn_hidden_size", "fine_grained_activation_offloading", "fp16"),
            *("fp16_lm_cross_entropy", "fp32_residual_connection", "fp4", "fp4_param_gather", "fp4_recipe", "fp8"),
            "fp8_output_proj",
            *("fp8_param_gather", "fp8_recipe", "freeze_all_layers", "full_validation", "global_batch_size"),
            *("gradient_accumulation_fusion", "gtp_weight_remat_size", "hidden_dropout", "hidden_size"),
            *("high_priority_stream_groups", "hybrid_context_parallel", "hybrid_layer_pattern"),
            *("init_method_std", "init_method_xavier_uniform"),
            *("init_model_with_meta_device", "inprocess_restart", "kv_channels", "layernorm_epsilon", "load"),
            *("layernorm_zero_centered_gamma", "local_rank", "normalization"),
            *("log_interval", "log_straggler", "logit_dtype", "logits_load_dir", "logits_save_dir", "loss_scale", "lr"),
            *("lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples"),
            *("make_vocab_size_divisible_by", "max_position_embeddings", "micro_batch_size"),
            *("microbatch_group_size_per_vp_stage", "min_lr", "moe_expert_rank_capacity_factor"),
            *("moe_grouped_gemm", "moe_paged_stash", "moe_single_grouped_bias", "moe_single_grouped_weight"),
            *(
                "mock_data",
                "moe_use_upcycling",
                "mtp_detach_heads",
                "mtp_hsm",
                "mtp_num_layers",
                "mtp_use_repeated_layer",
            ),
            *("multi_latent_attention", "multiple_validation_sets", "num_attention_heads"),
            *("num_distributed_optimizer_instances", "num_experts", "num_layers"),
            *("num_layers_per_virtual_pipeline_stage", "num_query_groups", "num_virtual_stages_per_pipeline_rank"),
            *("num_workers", "optimizer", "overlap_dispatch_backward_with_experts_wgrad", "overlap_grad_reduce"),
            *("overlap_moe_expert_parallel_comm", "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"),
            *("pad_vocab_size", "padded_vocab_size", "perform_rl_step", "pipeline_model_parallel_comm_backend"),
            *("pipeline_model_parallel_layout", "pipeline_model_parallel_size", "q_lora_rank", "qk_layernorm", "rank"),
            *(
                "recompute_granularity",
                "rerun_mode",
                "reset_attention_mask",
                "reset_position_ids",
                "rotary_base",
                "save",
            ),
            *("save_activations_interval", "save_dgrads_interval", "save_interval"),
            *("seed", "seq_length", "sequence_parallel", "sft"),
            *("sgd_momentum", "skip_train", "softmax_type", "te_precision_config_file"),
            *("tensor_model_parallel_size", "tensorboard_dir", "tensorboard_log_interval", "tokenizer_type"),
            *("tp_comm_overlap", "train_iters", "train_samples", "transformer_impl"),
            *("untie_embeddings_and_output_weights", "use_grouped_gemm_for_shared_expert", "use_megatron_fsdp"),
            *("overlap_param_gather_with_optimizer_step", "use_layer_wise_distributed_optimizer"),
            *("use_ring_exchange_p2p", "use_torch_fsdp2", "use_tp_pp_dp_mapping", "use_transformer_engine_op_fuser"),
            *("validation_set_names", "virtual_pipeline_model_parallel_size", "vocab_size", "weight_decay"),
            *("wandb_project", "window_size", "world_size", "yaml_cfg"),
            *("check_weight_hash_across_dp_replicas_interval", "dataloader_type", "end_weight_decay"),
            *("eval_global_batch_size", "exit_duration_in_mins", "gpu_sniff_test_interval", "group_query_attention"),
            *("hysteresis", "initial_loss_scale", "iterations_to_skip", "log_memory_interval", "loss_scale_window"),
            *("lr_decay_style", "lr_warmup_init", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            *("manual_gc_interval", "min_loss_scale", "override_opt_param_scheduler"),
            *("phase_transition_iterations", "profile", "profile_step_end", "profile_step_start"),
            *("start_eval_at_iter", "start_weight_decay", "train_sync_interval"),
            "use_checkpoint_opt_param_scheduler",
            *("data_parallel_size", "fim_data", "per_dataset_sequences_path"),
            *("decrease_batch_size_if_needed", "step_batch_size_schedule", "tensor_parallel_num_weight_shards"),
        ),
    ),
    "platform": Reads(
        "to report which of Transformer Engine, Apex and PyTorch computes an operation, and to run without a GPU",
        (
            *("bf16", "fp16", "gradient_accumulation_fusion", "masked_softmax_fusion", "normalization"),
            *("transformer_impl", "use_pytorch_profiler"),
        ),
    ),
    "replay": Reads(
        "to replay a single rank of a job",
        ("padded_vocab_size",),
    ),
    "reports": Reads(
        "to report the passes, times and memory of a rank",
        (
            *("curr_iteration", "fake_process_group", "log_interval"),
            *("padded_vocab_size", "pipeline_model_parallel_layout"),
            *("pipeline_model_parallel_size", "rank", "tensor_model_parallel_size", "train_iters", "world_size"),
        ),
    ),
    "start": Reads(
        "to check a job before its ranks start",
        (
            *("context_parallel_size", "data_parallel_size", "distributed_backend"),
            *("distributed_timeout_minutes", "global_batch_size", "rank"),
            *("load", "micro_batch_size", "pipeline_model_parallel_size", "save", "step_batch_size_schedule"),
            *("tensor_model_parallel_size", "tensorboard_dir", "train_iters", "train_samples", "use_checkpoint_args"),
            "world_size",
        ),
    ),
    "storage": Reads(
        "to check data and checkpoints",
        (
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "async_save"),
            *("async_strategy", "ckpt_convert_format", "ckpt_convert_save", "ckpt_step", "data_args_path", "data_path"),
            *(
                "decoder_first_pipeline_num_layers",
                "decoder_last_pipeline_num_layers",
                "decoupled_lr",
                "decoupled_min_lr",
            ),
            *("dist_ckpt_optim_fully_reshardable", "end_weight_decay"),
            *("exit_on_missing_checkpoint", "expert_model_parallel_size", "finetune", "global_batch_size"),
            *("hybrid_layer_pattern", "load", "lr", "lr_decay_iters", "lr_decay_samples", "lr_decay_style"),
            *("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "min_lr", "mock_data", "no_load_optim"),
            *("no_load_rng", "non_persistent_ckpt_type", "non_persistent_global_ckpt_dir", "num_experts"),
            *("optimizer", "override_opt_param_scheduler", "padded_vocab_size", "per_split_data_args_path"),
            *("pipeline_model_parallel_layout", "pipeline_model_parallel_size", "pretrained_checkpoint", "save"),
            *("sft", "skip_train", "split", "start_weight_decay", "tensor_model_parallel_size", "tokenizer_model"),
            *("tokenizer_type", "vocab_size", "train_iters", "train_samples", "untie_embeddings_and_output_weights"),
            *("use_checkpoint_opt_param_scheduler", "use_distributed_optimizer"),
            "use_layer_wise_distributed_optimizer",
            *("virtual_pipeline_model_parallel_size", "weight_decay_incr_style"),
        ),
    ),
    "training": Reads(
        "to run the pipeline schedule",
        (
            *("dataloader_inter_document_masking", "eval_iters", "fake_process_group", "mtp_num_layers"),
            *("multiple_validation_sets", "padded_vocab_size", "pipeline_model_parallel_layout", "sft"),
            "validation_set_names",
        ),
    ),
    "pretrain_gpt_vp.py": Reads(
        "in pretrain_gpt_vp.py, to read data and build the model",
        (
            *("allow_ambiguous_pad_tokens", "check_for_nan_in_loss_and_grad", "check_for_spiky_loss"),
            *("context_parallel_size", "create_attention_mask_in_dataloader", "data_cache_path"),
            *("dataloader_defer_npy_index_mmap", "dataloader_fast_cache_load", "dataloader_inter_document_masking"),
            *("eod_mask_loss", "eval_micro_batch_size", "full_validation"),
            *("hybrid_layer_pattern", "micro_batch_size"),
            *("mid_level_dataset_surplus", "mmap_bin_files", "mock_data", "mtp_num_layers"),
            *("multiple_validation_sets", "num_dataset_builder_threads", "object_storage_cache_path"),
            "pipeline_model_parallel_layout",
            *("pipeline_model_parallel_size", "reset_attention_mask", "reset_position_ids", "seed", "seq_length"),
            *("sft", "split", "untie_embeddings_and_output_weights"),
        ),
    ),
}

DERIVED = (
    *("rank", "world_size", "data_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "use_layer_wise_distributed_optimizer"),
)
"""Arguments without a command-line option, which Megatron sets during its own validation."""

IN_TRAINING = ("curr_iteration",)
"""Arguments that Megatron's training loop sets, too late for a check at startup."""


LACKS: dict[str, tuple[str, ...]] = {"0.19": ("logit_dtype", "mtp_hsm")}
"""Arguments that a release series of megatron-core lacks, and that our sources do not need in that series."""


def missing() -> list[Problem]:
    """Build Megatron's parser, and return the arguments that we read but that the parser lacks."""
    from megatron.training.arguments import add_megatron_arguments

    options = {action.dest for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions}
    return [
        Problem(f"the argument '{name}'", f"an option, {use}", "nothing")
        for name, use in _read_here()
        if name not in DERIVED and name not in options
    ]


def check_parsed(args: argparse.Namespace) -> None:
    """Check that parsed arguments include every option that we read. Raises UserError."""
    _require(args, derived=False)


def check_validated(args: argparse.Namespace) -> None:
    """Check that validated arguments include every derived argument that we read. Raises UserError."""
    _require(args, derived=True)


def _read_here() -> list[tuple[str, str]]:
    """The arguments that we need from the installed Megatron and can check at startup, each with its `Reads.use`."""
    lacks = (*LACKS.get(present_series(), ()), *IN_TRAINING)
    return [(name, reads.use) for reads in READ.values() for name in reads.names if name not in lacks]


def _require(args: argparse.Namespace, derived: bool) -> None:
    for name, use in _read_here():
        if (name in DERIVED) == derived and not hasattr(args, name):
            raise UserError(
                f"megatron-core {present_version()} has no argument '{name}', but megatron_vp reads it "
                f"{use} (tested with megatron-core {', '.join(TESTED_VERSIONS)}): install "
                f"megatron-core=={RELEASE}"
            )
