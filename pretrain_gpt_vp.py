"""Pretrain a GPT or hybrid model with Megatron-Core and the megatron_vp plug-in.

    torchrun --nproc-per-node N pretrain_gpt_vp.py --config FILE.yaml [--vocab-parallel] [any Megatron flag]

A hybrid model needs --hybrid-layer-pattern. Without --vocab-parallel and --pipeline-schedule, the script runs plain
Megatron. Megatron calls the functions below; to change one of them, copy this file.
"""
# ruff: noqa: E402 (the plug-in must come first, because Megatron reads environment variables when it is imported)

from __future__ import annotations

import time

STARTED = time.time()

from megatron_vp.mcore.start.launch import one_line_errors, prepare

if __name__ == "__main__":
    prepare()

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, set_startup_timestamps
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_vp.mcore.options.refusals import refuse_no_data, refuse_script_options
from megatron_vp.mcore.storage.attempt import noting_the_end

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
BOUNDARY_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""For packed sequences: the document boundaries, int32 [1, documents + 1], and the length of the longest document."""


def get_batch(data_iterator: Any, vp_stage: int | None, micro_batch_size: int) -> tuple[torch.Tensor | None, ...]:
    """Return the next microbatch in the order of BATCH_KEYS: int64 [b, s], loss mask fp32, attention mask bool [b, 1,
    s, s].

    Middle pipeline stages get only None and do not use the iterator, unless they predict further tokens. The first
    stage gets no labels, and the last stage gets no tokens. Tensor-parallel rank 0 reads the data and broadcasts it.
    Each context-parallel rank gets its part of the sequence.

    The values of BOUNDARY_KEYS follow; they are None unless sequences are packed. With packed sequences, every stage
    reads these values for its attention, and the b sequences are joined into one, [1, b s].
    """
    keys, uses_tokens = BATCH_KEYS + BOUNDARY_KEYS, uses_tokens_or_labels(vp_stage)
    if not uses_tokens and not packs_sequences():
        return (None,) * len(keys)
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    # On the device, flattening and broadcasting boundaries would make the host wait for all work issued before.
    alone = mpu.get_tensor_model_parallel_world_size() == 1
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {key: sample.get(key) for key in keys}
        if alone:
            batch = flatten_batch_for_packed_sequences(batch)
        stays = ("max_seqlen",) if alone else ()
        for key, value in batch.items():
            batch[key] = value if value is None or key in stays else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packs_sequences() and not alone,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further_tokens(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = {key: batch.get(key) for key in keys}
    if not alone:
        batch = flatten_batch_for_packed_sequences(batch)
    if not uses_tokens:
        return (None,) * len(BATCH_KEYS) + tuple(batch[key] for key in BOUNDARY_KEYS)
    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return tuple(batch[key] for key in keys)


def packs_sequences() -> bool:
    """Whether sequences hold several documents and attention does not cross document boundaries."""
    args = get_args()
    return args.sft or args.dataloader_inter_document_masking


def packed_parameters(
    ends: torch.Tensor | None, padded_ends: torch.Tensor | None, longest: torch.Tensor | None
) -> PackedSeqParams | None:
    """The values of BOUNDARY_KEYS in the form that Megatron's layers expect; None if sequences are not packed."""
    if ends is None:
        return None
    ends = (ends if padded_ends is None else padded_ends).squeeze(0)
    padded_ends = None if padded_ends is None else ends
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded_ends,
        cu_seqlens_kv_padded=padded_ends,
        max_seqlen_q=int(longest),
        max_seqlen_kv=int(longest),
        tokens_per_sample=get_args().seq_length,
    )


def layer_layout() -> PipelineParallelLayerLayout | None:
    """The stages' layers, if --pipeline-model-parallel-layout gives them."""
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    return None if layout is None else PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)


def predicts_further_tokens(vp_stage: int | None) -> bool:
    """Whether this stage holds multi-token prediction layers, which need the tokens for their embeddings."""
    return mtp_on_this_rank(layer_layout(), get_args().mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


def uses_tokens_or_labels(vp_stage: int | None) -> bool:
    """Whether this stage uses tokens or labels: the first, the last, and the one that predicts further tokens."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_further_tokens(vp_stage)


def loss_func(loss_mask: torch.Tensor, token_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return the masked sum of the token losses (fp32), the number of unmasked tokens, and both values for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_loss.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    args, rerun = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            message = f"{name} in the loss of a microbatch"
            rerun.validate_result(result=loss, rejection_func=is_bad, message=message, tolerance=0.0, fatal=True)
    # Clone the loss, because the schedule divides it in place.
    return loss, tokens, {"lm loss": torch.cat([loss.detach().clone().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, partial]:
    """Run the model on one microbatch. Returns the output, and the loss function for the output of the last stage.

    With `return_schedule_plan`, as Megatron's own schedules call it for --overlap-moe-expert-parallel-comm, return the
    plan of the model's layers instead of the output.
    """
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids, *boundaries = get_batch(data_iterator, vp_stage, size)
    packed = packed_parameters(*boundaries)
    if packed is not None and model.training and not vp_stage:
        update_seqlen_stats_from_cu_seqlens(boundaries[0].squeeze(0))  # for Megatron's FLOP count
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed)
    return output, partial(loss_func, loss_mask)


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: tensor rank 0 of the stages that use tokens or labels, or, if packed, of all."""
    return (packs_sequences() or uses_tokens_or_labels(vp_stage)) and mpu.get_tensor_model_parallel_rank() == 0


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Build the training, validation and test datasets, each with the number of samples in `samples`.

    The data comes from --data-path (with --sft, JSONL files of conversations) or --mock-data.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        full_validation=args.full_validation,
        multiple_validation_sets=args.multiple_validation_sets,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        context_parallel_size=args.context_parallel_size,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    built_here = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(kind, samples, built_here, config).build()


# Without this attribute, Megatron would not call the provider on every tensor-parallel rank.
datasets_provider.is_distributed = True


def get_embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """The pipeline ranks that hold word embeddings: the first, those of MTP layers, and the last if tied."""
    args = get_args()
    placed = SimpleNamespace(mtp_num_layers=args.mtp_num_layers, pipeline_model_parallel_layout=layer_layout())
    tied = [] if args.untie_embeddings_and_output_weights else [pipeline_ranks[-1]]
    return sorted({pipeline_ranks[0], *get_mtp_ranks(pipeline_ranks, placed), *tied})


def main() -> None:
    """Check arguments and inputs, then train. Invalid input raises UserError before any process group exists."""
    set_startup_timestamps(program_start=STARTED, main_entry=time.time())
    args = parse_and_validate_args()
    refuse_script_options(args)
    refuse_no_data(args)
    model_config = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    config = pretrain_cfg_container_from_args(args, model_config(args))
    with noting_the_end():
        pretrain(
            config,
            datasets_provider,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step,
            get_embedding_ranks=get_embedding_ranks,
        )


if __name__ == "__main__":
    with one_line_errors():
        main()
