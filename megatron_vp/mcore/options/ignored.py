"""Warnings about options that do not have their intended effect, and about jobs that train something else."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vp.jobs.settings import ONE_QUEUE
from megatron_vp.mcore.settled import run_settings, words


@dataclass(frozen=True)
class Ignored:
    """A Megatron option that does not have its intended effect if `asked(args)` is true.

    why: why the option does not have this effect, and what to use instead.
    does: what the option does instead.
    because_of: what prevents the effect in plain Megatron too; None if our schedule or passes prevent it.
    """

    option: str
    asked: Callable[[argparse.Namespace], Any]
    why: str
    does: str = "has no effect"
    because_of: str | None = None


def _masks_tokens(a: argparse.Namespace) -> bool:
    """Whether sequences differ in the number of tokens whose loss is trained."""
    return bool(a.eod_mask_loss or a.sft)


_MASKS = "masked tokens (--eod-mask-loss, --sft)"


def _balances_experts(a: argparse.Namespace) -> bool:
    coefficients = a.moe_aux_loss_coeff if isinstance(a.moe_aux_loss_coeff, list) else [a.moe_aux_loss_coeff]
    return a.moe_z_loss_coeff or (any(coefficients) and "aux_loss" in str(a.moe_router_load_balancing_type))


def _unmasked_stages(a: argparse.Namespace) -> int:
    """The number of stages whose attention, with --reset-attention-mask, gets no mask or ignores it."""
    if not a.reset_attention_mask or a.dataloader_inter_document_masking:
        return 0
    stages = a.pipeline_model_parallel_size * (a.virtual_pipeline_model_parallel_size or 1)
    return stages if a.transformer_impl != "local" else max(0, stages - 2)


# Megatron's own faults, in 0.19 and on the main branch at d98e8a64 (0.20). Equal losses do not show them.
FAULTS = (
    Ignored(
        "--context-parallel-size without --calculate-per-token-loss",
        # pipeline_parallel/schedules.py, forward_step_calc_loss
        lambda a: a.context_parallel_size > 1 and not a.calculate_per_token_loss and _masks_tokens(a),
        "Megatron divides the loss of each part of a sequence by the number of trained tokens in that part alone; add "
        "--calculate-per-token-loss",
        does="weights tokens unequally",
        because_of=_MASKS,
    ),
    Ignored(
        "--mtp-num-layers with --calculate-per-token-loss",
        # transformer/multi_token_prediction.py, process_mtp_loss
        lambda a: a.mtp_num_layers and a.calculate_per_token_loss and _masks_tokens(a),
        "Megatron scales the loss of the prediction heads by the token counts of each microbatch alone; leave "
        "--calculate-per-token-loss out",
        does="weights the heads' tokens unequally",
        because_of=_MASKS,
    ),
    Ignored(
        "--moe-aux-loss-coeff or --moe-z-loss-coeff with --calculate-per-token-loss",
        # transformer/moe/router.py, attach_and_log_load_balancing_loss and apply_z_loss
        lambda a: a.num_experts and a.calculate_per_token_loss and _masks_tokens(a) and _balances_experts(a),
        "Megatron multiplies these losses by the number of all tokens, and divides gradients by the number of trained "
        "tokens; leave --calculate-per-token-loss out, or lower the coefficients by the share of trained tokens",
        does="is too strong",
        because_of=_MASKS,
    ),
    Ignored(
        "--reset-attention-mask",
        # `get_batch` of pretrain_gpt.py; extensions/transformer_engine.py, TEDotProductAttention: a causal mask
        _unmasked_stages,
        "only the first and the last stage get masks, and Transformer Engine's layers ignore them, so tokens attend to "
        "earlier documents; use --dataloader-inter-document-masking (with local layers, add --core-attention sdpa)",
        does="masks too little",
        because_of="Transformer Engine's layers or more than two pipeline stages",
    ),
    Ignored(
        "--multi-latent-attention",
        # transformer/multi_latent_attention.py, get_query_key_value_tensors: gather_from_tensor_model_parallel_region
        lambda a: a.multi_latent_attention and a.transformer_impl == "local" and a.tensor_model_parallel_size > 1,
        "the gradient of the rotary key, which all heads share, is not summed over the tensor ranks; use "
        "--tensor-model-parallel-size 1 (Transformer Engine's layers gather this key differently and were not tested)",
        does="gets wrong gradients",
        because_of="--tensor-model-parallel-size and --transformer-impl local",
    ),
    Ignored(
        "--softmax-type learnable",
        # transformer/dot_product_attention.py: `softmax_offset` is not marked as tensor parallel
        lambda a: a.softmax_type == "learnable" and a.tensor_model_parallel_size > 1,
        "the norms of gradients and parameters count only the first tensor rank's attention sinks, so gradients are "
        "clipped too little; use --tensor-model-parallel-size 1, or --clip-grad 0",
        does="lowers the logged norms",
        because_of="--tensor-model-parallel-size",
    ),
    Ignored(
        "--train-iters",
        # training/training.py, get_optimizer_param_scheduler and get_train_valid_test_num_samples
        lambda a: a.step_batch_size_schedule and a.train_iters,
        "Megatron prepares data, and ends the decay of the learning rate, as if each iteration had one microbatch per "
        "replica; use --train-samples",
        does="counts too few samples",
        because_of="--step-batch-size-schedule",
    ),
    Ignored(
        "--log-params-norm",
        # training/utils/common_utils.py, calc_params_l2_norm, before the next forward gathers the parameters
        lambda a: (
            a.log_params_norm
            and a.overlap_param_gather
            and not (a.bf16 or a.use_megatron_fsdp)
            and a.data_parallel_size * a.context_parallel_size > 1
        ),
        "after a step, each rank has updated only its own part of the parameters, and gathers the others in the next "
        "forward pass; leave --overlap-param-gather out, or train with --bf16",
        does="mixes old and new parameters",
        because_of="--overlap-param-gather",
    ),
)

IGNORED = (
    Ignored(
        "--cross-entropy-loss-fusion",
        lambda a: a.vocab_parallel and a.cross_entropy_loss_fusion,
        "passes S and T compute their own softmax, with statistics in fp32",
    ),
    Ignored(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        lambda a: run_settings(a).replaces_schedule and a.microbatch_group_size_per_vp_stage is not None,
        "the plug-in derives the order of passes from their predicted times",
    ),
    Ignored(
        "--overlap-p2p-communication-warmup-flush",
        lambda a: run_settings(a).replaces_schedule and a.overlap_p2p_comm_warmup_flush,
        "messages between stages overlap with the passes throughout the schedule",
    ),
    Ignored(
        "--use-ring-exchange-p2p",
        lambda a: run_settings(a).replaces_schedule and a.use_ring_exchange_p2p,
        "every pair of neighbouring ranks has its own communicators",
    ),
    Ignored(
        "--pipeline-model-parallel-comm-backend",
        lambda a: run_settings(a).replaces_schedule and a.pipeline_model_parallel_comm_backend is not None,
        "the pipeline's communicators use the backend that --distributed-backend selects",
    ),
    Ignored(
        "--no-overlap-p2p-communication",
        lambda a: (
            run_settings(a).replaces_schedule
            and a.virtual_pipeline_model_parallel_size is not None
            and not a.overlap_p2p_comm
        ),
        "messages between stages always overlap with the passes",
    ),
    Ignored(
        "--high-priority-stream-groups pp",
        lambda a: run_settings(a).replaces_schedule and "pp" in a.high_priority_stream_groups,
        "the pipeline's communicators always use high-priority streams",
    ),
    Ignored(
        "--defer-embedding-wgrad-compute",
        # `settle` has switched the option off in the arguments, so look for it on the command line.
        lambda a: run_settings(a).replaces_schedule and "defer_embedding_wgrad_compute" in words().options,
        "the schedule decides when weight gradients are computed; with --vocab-parallel, pass T computes the output "
        "layer's weight gradient in otherwise idle time",
    ),
    Ignored(
        "--save-activations-interval or --save-dgrads-interval for the output layer",
        lambda a: a.vocab_parallel and (a.save_activations_interval or a.save_dgrads_interval),
        "Megatron saves activations and gradients through hooks on its own output layer, which --vocab-parallel "
        "replaces with shards",
    ),
    Ignored(
        "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split",
        lambda a: (
            a.vocab_parallel and (a.account_for_embedding_in_pipeline_split or a.account_for_loss_in_pipeline_split)
        ),
        "every rank holds a shard of the vocabulary layers, so a stage with fewer layers waits for the others; leave "
        "the option out, or assign the layers to stages with --pipeline-model-parallel-layout",
        does="unbalances the stages",
    ),
    Ignored(
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        # Megatron requires the variable for tensor and context parallelism.
        lambda a: (
            os.environ.get(ONE_QUEUE) == "1"
            and a.distributed_backend == "nccl"
            and a.tensor_model_parallel_size == a.context_parallel_size == 1
            and (a.vocab_parallel or run_settings(a).offloads)
        ),
        "all streams share one hardware queue; unset the variable, which only tensor and context parallelism need",
        does="lets a collective or copy that waits block all passes issued after it",
    ),
    Ignored(
        "--moe-grouped-gemm",
        lambda a: a.moe_grouped_gemm and a.transformer_impl == "local",
        "Megatron's local layers compute one expert after another",
        because_of="--transformer-impl local",
    ),
    *FAULTS,
)


UNREAD = {
    "--rampup-batch-size": "use --step-batch-size-schedule",
    "--use-flash-attn": "use --attention-backend flash",
    "--is-hybrid-model": "use --hybrid-layer-pattern",
    "--enable-full-sharding-in-hsdp": "use --outer-dp-sharding-strategy",
    "--vocab-extra-ids": "use a tokenizer that has these tokens",
    **dict.fromkeys(
        (
            *("--openai-gelu", "--apply-residual-connection-post-layernorm", "--onnx-safe"),
            *("--exit-signal-handler-for-dataloader", "--dist-ckpt-save-pre-mcore-014"),
            *("--inprocess-max-iterations", "--inprocess-progress-watchdog-interval"),
        ),
        "leave the option out",
    ),
}
"""Options for training that no code of Megatron reads, in 0.19 and on the main branch at d98e8a64, and what to do."""


def warnings_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return a sentence for each entry of IGNORED and UNREAD that applies to validated Megatron arguments."""
    ours = f"--pipeline-schedule {args.pipeline_schedule}{' and --vocab-parallel' * args.vocab_parallel}"
    return (
        *(
            f"{each.option} {each.does} with {each.because_of or ours}: {each.why}"
            for each in IGNORED
            if each.asked(args)
        ),
        *(
            f"{option} has no effect, because no code of Megatron reads it: {UNREAD[option]}"
            for option in words().options.values()
            if option in UNREAD
        ),
    )
