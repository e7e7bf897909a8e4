"""Refusals of jobs with packed sequences, in which each token attends only to its own document."""

from __future__ import annotations

import argparse

from megatron_vp.mcore.options.refusal import Refusal
from megatron_vp.mcore.options.refused_options import RefusedOption
from megatron_vp.mcore.platform.installed import installed
from megatron_vp.mcore.settled import run_settings


def _packs(a: argparse.Namespace) -> bool:
    return a.sft or a.dataloader_inter_document_masking


def _graphs_hold_attention(a: argparse.Namespace) -> bool:
    named = [getattr(module, "name", module) for module in a.cuda_graph_modules or ()]
    return a.cuda_graph_impl in ("local", "transformer_engine") and (not named or "attn" in named)


PACKING = "packed sequences (--sft, --dataloader-inter-document-masking)"

REFUSED_PACKING = (
    RefusedOption(
        f"{PACKING}, --context-parallel-size and --mtp-num-layers",
        lambda a: _packs(a) and a.context_parallel_size > 1 and a.mtp_num_layers,
        "prediction heads also need later tokens of the sequence, which may be on another context-parallel rank",
        "leave one of these options out",
    ),
    RefusedOption(
        f"{PACKING} and --cuda-graph-impl {{cuda_graph_impl}}",
        lambda a: _packs(a) and _graphs_hold_attention(a),
        "a CUDA graph that contains attention cannot receive document boundaries",
        "leave attn out of --cuda-graph-modules or use --cuda-graph-impl none",
    ),
)
"""Combinations that are refused only with our schedules."""

PACKING_REFUSALS = (
    Refusal(
        lambda a: a.sft and (a.mock_data or a.tokenizer_type != "SFTTokenizer"),
        "--sft cannot work without --data-path and --tokenizer-type SFTTokenizer: Megatron reads conversations from "
        "JSONL files and tokenizes them with a prompt template; add both options, or leave --sft out",
    ),
    Refusal(
        lambda a: a.sft and (a.create_attention_mask_in_dataloader or a.reset_position_ids or a.reset_attention_mask),
        "--sft with attention masks from the data loader, --reset-position-ids or --reset-attention-mask cannot work: "
        "packed conversations use their own position ids, and document boundaries instead of masks; add "
        "--no-create-attention-mask-in-dataloader, and leave the other two options out",
    ),
    Refusal(
        lambda a: a.sft and not installed().datasets,
        "--sft needs the package datasets, with which Megatron reads conversations, but it is not installed: run `pip "
        "install datasets`, or leave --sft out",
    ),
    Refusal(
        lambda a: (
            _packs(a)
            and a.transformer_impl == "local"
            and a.core_attention == "megatron"
            and a.hybrid_layer_pattern is None
        ),
        f"{PACKING} with --transformer-impl local and --core-attention megatron cannot work: Megatron's local "
        "attention does not support document boundaries; use --core-attention sdpa, or --transformer-impl "
        "transformer_engine",
    ),
    Refusal(
        lambda a: (
            _packs(a)
            and a.pipeline_model_parallel_size > 1
            and max(a.micro_batch_size, a.eval_micro_batch_size or 0) > 1
            and not run_settings(a).replaces_schedule
        ),
        f"{PACKING} with --pipeline-model-parallel-size {{pipeline_model_parallel_size}} and a micro-batch size above "
        "1 cannot work under Megatron's own schedule: Megatron's scripts concatenate the sequences of a micro-batch, "
        "but the pipeline stages expect them to be separate; use --micro-batch-size 1 and --eval-micro-batch-size 1, "
        "or one of our schedules (--pipeline-schedule)",
    ),
    Refusal(
        lambda a: a.core_attention == "sdpa" and a.context_parallel_size > 1 and _packs(a) and not a.sft,
        "--core-attention sdpa with --dataloader-inter-document-masking and --context-parallel-size is not supported: "
        "Megatron then splits the whole sequence among the ranks, but attention needs every document to be split; use "
        "--context-parallel-size 1, or --sft",
    ),
)
"""Combinations that are refused in every run, even with Megatron's own schedules."""
