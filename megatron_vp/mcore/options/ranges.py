"""Checks that Megatron's arguments for sizes, intervals and rates are in range.

Megatron does not check these ranges: a wrong number either goes unnoticed, or later causes an error on every rank.
"""

from __future__ import annotations

import argparse

from megatron_vp.errors import Refused

AT_LEAST_ONE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("seq_length", "max_position_embeddings", "micro_batch_size", "global_batch_size", "seed"),
    *("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    *("log_interval", "eval_interval", "save_interval", "tensorboard_log_interval", "log_memory_interval"),
    *("check_weight_hash_across_dp_replicas_interval", "gpu_sniff_test_interval"),
    *("eval_micro_batch_size", "eval_global_batch_size"),
    *("rotary_base", "distributed_timeout_minutes", "distributed_timeout_seconds_after_init"),
)
AT_LEAST_ZERO = (
    *("exit_duration_in_mins", "train_sync_interval", "manual_gc_interval", "start_eval_at_iter"),
    *("train_iters", "train_samples", "exit_interval", "eval_iters", "num_workers", "num_experts", "mtp_num_layers"),
    *("log_pipeline_interval",),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples"),
    *("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "init_method_std", "layernorm_epsilon", "loss_scale"),
)
FROM_ZERO_BELOW_ONE = ("adam_beta1", "adam_beta2", "sgd_momentum", "attention_dropout", "hidden_dropout")


def check_ranges(args: argparse.Namespace) -> None:
    """Raise a UserError that lists every number in parsed arguments that is out of range."""
    refused = []
    for names, fits, allowed in (
        (AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (AT_LEAST_ZERO, lambda value: 0 <= value < float("inf"), "a finite number of at least 0"),
        (FROM_ZERO_BELOW_ONE, lambda value: 0 <= value < 1, "a number of at least 0 and less than 1"),
    ):
        for name in names:
            value = getattr(args, name, None)
            if isinstance(value, int | float) and not fits(value):  # Megatron handles None
                refused.append(f"--{name.replace('_', '-')} {value} is out of range: use {allowed}")
    if refused:
        raise Refused(refused)
