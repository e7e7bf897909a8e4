"""Lists, for each of our packages, the functions, classes and constants of Megatron that it uses without patching them.

`megatron-vp patches` compares the tables with the installed Megatron, so that changes in a new release show at once. An
entry maps `module:path` to what we expect of the symbol, in the notation of `patches.check_symbol`. `IN_SERIES` lists
the entries that are different for a release series.
"""

from __future__ import annotations

from megatron_vp.mcore.patches import Problem, check_symbol, present_series

IMPORTED: dict[str, dict[str, str]] = {
    "mcore": {
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules": "takes nothing",
        "megatron.core.models.hybrid.hybrid_block:HybridStack": "class",
        "megatron.core.models.hybrid.hybrid_block:HybridStackSubmodules": (
            "takes attention_layer, mlp_layer, mtp_block_spec"
        ),
        "megatron.core.ssm.mlp_layer:MLPLayer": "class",
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock": "class",
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlockSubmodules": "(layer_specs=None)",
        "megatron.core.transformer.multi_token_prediction:get_mtp_layer_spec": (
            "(mtp_model_layer_spec, use_transformer_engine)"
        ),
        "megatron.core.transformer.spec_utils:ModuleSpec": "takes module, submodules",
        "megatron.core.transformer.transformer_layer:TransformerLayer": "class",
        "megatron.core.transformer.transformer_layer:TransformerLayerSubmodules": (
            "takes input_layernorm, self_attention, self_attn_bda, pre_mlp_layernorm, mlp, mlp_bda"
        ),
        "megatron.training.arguments:add_megatron_arguments": "(parser)",
    },
    "model": {
        "megatron.core.dist_checkpointing.mapping:ShardedObject": "class",
        "megatron.core.dist_checkpointing.mapping:ShardedTensor": (
            "takes key, data, dtype, local_shape, global_shape, global_offset, axis_fragmentations, replica_id, "
            "allow_shape_mismatch"
        ),
        "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs:get_gpt_heterogeneous_layer_spec": (
            "(config, use_te=False, vp_stage=None, pp_rank=None)"
        ),
        "megatron.core.models.gpt:GPTModel": "class",
        "megatron.core.models.hybrid.hybrid_model:HybridModel": "class",
        "megatron.core.parallel_state:get_pipeline_model_parallel_rank": "()",
        "megatron.core.parallel_state:get_virtual_pipeline_model_parallel_world_size": "()",
        "megatron.core.parallel_state:set_virtual_pipeline_model_parallel_world_size": "(world_size)",
        "megatron.core.process_groups_config:ProcessGroupCollection": "class",
        "megatron.core.process_groups_config:ProcessGroupCollection.use_mpu_process_groups": "(required_pgs=None)",
        "megatron.core.tensor_parallel.random:_fork_rng": "()",
        "megatron.core.tensor_parallel:ColumnParallelLinear": "class",
        "megatron.core.tensor_parallel:VocabParallelEmbedding": "class",
        "megatron.core.tensor_parallel:gather_from_sequence_parallel_region": (
            "(input_, tensor_parallel_output_grad=True, group=None, output_split_sizes=None, use_global_buffer=False)"
        ),
        "megatron.core.tensor_parallel:get_cuda_rng_tracker": (
            "(use_te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False)"
        ),
        "megatron.core.tensor_parallel:set_tensor_model_parallel_attributes": "(tensor, is_parallel, dim, stride)",
        "megatron.core.transformer.enums:AttnMaskType": "class",
        "megatron.core.transformer.enums:AttnMaskType.causal": "value",
        "megatron.core.transformer.enums:LayerType": "class",
        "megatron.core.transformer.enums:LayerType.decoder": "value",
        "megatron.core.transformer.heterogeneous.heterogeneous_config:HeterogeneousTransformerConfig": "class",
        "megatron.core.transformer.module:MegatronModule": "(config)",
        "megatron.core.transformer.multi_token_prediction:process_mtp_loss": (
            "takes hidden_states, labels, loss_mask, output_layer, output_weight, runtime_gather_output, is_training, "
            "compute_language_model_loss, config, cp_group"
        ),
        "megatron.core.transformer.multi_token_prediction:roll_tensor": (
            "(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None)"
        ),
        "megatron.core.transformer.dot_product_attention:DotProductAttention": "class",
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.from_str": (
            "(layout, pipeline_model_parallel_size)"
        ),
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout": (
            "(layout, pipeline_model_parallel_size)"
        ),
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.parse_str_to_list": (
            "(layout_str)"
        ),
        "megatron.core.transformer.transformer_config:TransformerConfig": "class",
        "megatron.core.transformer.utils:make_sharded_object_for_checkpoint": (
            "(obj, key, sharded_offsets=(), replica_id=None, **kwargs)"
        ),
        "megatron.core.utils:get_pg_rank": "(group=None)",
        "megatron.core.utils:unwrap_model": "(model, module_instances=None)",
        "megatron.training.models.gpt:GPTModelBuilder": "(model_config)",
        "megatron.training.models.hybrid:HybridModelBuilder": "(model_config)",
        "megatron.training.utils:print_rank_0": "(message, rank=None)",
    },
    "options": {
        "megatron.core.transformer.enums:LayerType": "class",
        "megatron.core.transformer.enums:LayerType.decoder": "value",
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout": (
            "(layout, pipeline_model_parallel_size)"
        ),
        "megatron.core.utils:get_te_version": "()",
        "megatron.core.utils:is_te_min_version": "(version, check_equality=True)",
    },
    "platform": {
        "megatron.core.datasets:__file__": "value",
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller": "class",
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop": (
            "(rank, queue, preload_q, comp_q, log_level=20, cpu_priority=10, io_priority=None)"
        ),
        "megatron.core.transformer.torch_norm:WrappedTorchNorm": (
            "(config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
            "normalization='LayerNorm')"
        ),
    },
    "replay": {
        "megatron.core.parallel_state:get_tensor_model_parallel_rank": "()",
    },
    "reports": {
        "megatron.core.parallel_state:get_data_parallel_rank": "takes with_context_parallel",
        "megatron.core.parallel_state:get_pipeline_model_parallel_group": "(check_initialized=True)",
        "megatron.core.parallel_state:get_pipeline_model_parallel_rank": "()",
        "megatron.core.parallel_state:get_pipeline_model_parallel_world_size": "()",
        "megatron.core.parallel_state:get_tensor_model_parallel_rank": "()",
        "megatron.training.global_vars:get_tensorboard_writer": "()",
        "megatron.training.global_vars:get_wandb_writer": "()",
        "megatron.training.utils:print_rank_last": "(message)",
    },
    "start": {
        "megatron.core.parallel_state:get_virtual_pipeline_model_parallel_world_size": "()",
        "megatron.core.parallel_state:model_parallel_is_initialized": "()",
        "megatron.training.argument_utils:core_transformer_config_from_args": "(args, config_class=None)",
        "megatron.training.arguments:add_megatron_arguments": "(parser)",
        "megatron.training.arguments:parse_args": "(extra_args_provider=None, ignore_unknown_args=False)",
        "megatron.training.arguments:validate_args": "(args, defaults={})",
        "megatron.training.checkpointing:load_args_from_checkpoint": (
            "(args, load_arg='load', checkpointing_context=None)"
        ),
    },
    "storage": {
        "megatron.core.datasets.blended_megatron_dataset_config:convert_split_vector_to_split_matrix": (
            "(vector_a, vector_b=None)"
        ),
        "megatron.core.datasets.blended_megatron_dataset_config:parse_and_normalize_split": "(split)",
        "megatron.core.datasets.indexed_dataset:DType": "class",
        "megatron.core.datasets.indexed_dataset:DType.optimal_dtype": "(cardinality)",
        "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder": "takes bin_path, dtype",
        "megatron.core.datasets.indexed_dataset:_IndexReader": "takes idx_path, multimodal",
        "megatron.core.datasets.object_storage_utils:is_object_storage_path": "(path)",
        "megatron.core.dist_checkpointing:load_common_state_dict": "(checkpoint_dir)",
        "megatron.core.tokenizers.utils.build_tokenizer:build_tokenizer": "(args, **kwargs)",
        "megatron.core.tokenizers.utils.build_tokenizer:vocab_size_with_padding": (
            "(orig_vocab_size, args, logging_enabled=True)"
        ),
        "megatron.training.utils:get_blend_and_blend_per_split": "(args)",
    },
    "training": {
        "megatron.core.distributed.data_parallel_base:_BaseDataParallel": "class",
        "megatron.core.distributed:DistributedDataParallel": "class",
        "megatron.core.num_microbatches_calculator:get_num_microbatches": "()",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator": "class",
        "megatron.core.pipeline_parallel.schedules:backward_step": (
            "(input_tensor, output_tensor, output_tensor_grad, config)"
        ),
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": (
            "(out, deallocate_pipeline_outputs=False)"
        ),
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss": (
            "(model, output_tensor, loss_func, config, vp_stage, collect_non_loss_data, num_microbatches, "
            "forward_data_store, cp_group_size=None, is_last_stage=None)"
        ),
        "megatron.core.pipeline_parallel.schedules:set_current_microbatch": "(model, microbatch_id)",
        "megatron.core.process_groups_config:ProcessGroupCollection": "class",
        "megatron.core.process_groups_config:ProcessGroupCollection.use_mpu_process_groups": "(required_pgs=None)",
        "megatron.core.rerun_state_machine:RerunState": "class",
        "megatron.core.rerun_state_machine:RerunState.RERUNNING_IN_PLACE": "value",
        "megatron.core.rerun_state_machine:get_rerun_state_machine": "()",
        "megatron.core.transformer.cuda_graphs:create_cudagraphs": "()",
        "megatron.core.utils:get_model_config": "(model)",
        "megatron.core.utils:unwrap_model": "(model, module_instances=None)",
        "megatron.training.utils:print_rank_0": "(message, rank=None)",
        "megatron.training:print_rank_0": "(message, rank=None)",
    },
    "pretrain_gpt_vp.py": {
        "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder": (
            "(cls, sizes, is_built_on_rank, config)"
        ),
        "megatron.core.datasets.gpt_dataset:GPTDataset": "class",
        "megatron.core.datasets.gpt_dataset:GPTDatasetConfig": (
            "takes random_seed, sequence_length, blend, blend_per_split, split, full_validation, "
            "multiple_validation_sets, num_dataset_builder_threads, fast_cache_load, defer_npy_index_mmap, "
            "mid_level_dataset_surplus, allow_ambiguous_pad_tokens, path_to_cache, mmap_bin_files, tokenizer, "
            "reset_position_ids, reset_attention_mask, eod_mask_loss, create_attention_mask, object_storage_cache_path"
        ),
        "megatron.core.datasets.gpt_dataset:MockGPTDataset": "class",
        "megatron.core.enums:ModelType": "class",
        "megatron.core.enums:ModelType.encoder_or_decoder": "value",
        "megatron.core.parallel_state:get_context_parallel_group": "(check_initialized=True)",
        "megatron.core.parallel_state:get_tensor_model_parallel_group": "(check_initialized=True)",
        "megatron.core.parallel_state:get_tensor_model_parallel_rank": "()",
        "megatron.core.parallel_state:get_tensor_model_parallel_src_rank": "()",
        "megatron.core.parallel_state:get_tensor_model_parallel_world_size": "()",
        "megatron.core.parallel_state:is_pipeline_first_stage": "(ignore_virtual=True, vp_stage=None)",
        "megatron.core.parallel_state:is_pipeline_last_stage": "(ignore_virtual=True, vp_stage=None)",
        "megatron.core.packed_seq_params:PackedSeqParams": (
            "takes qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, "
            "max_seqlen_kv, local_cp_size, tokens_per_sample"
        ),
        "megatron.core.rerun_state_machine:get_rerun_state_machine": "()",
        "megatron.core.transformer.multi_token_prediction:get_mtp_ranks": "takes pp_ranks, config",
        "megatron.core.transformer.multi_token_prediction:mtp_on_this_rank": (
            "(layout=None, mtp_num_layers=None, ignore_virtual=True, vp_stage=None)"
        ),
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout": "class",
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.from_str": (
            "(layout, pipeline_model_parallel_size)"
        ),
        "megatron.core.utils:flatten_batch_for_packed_sequences": "(batch)",
        "megatron.core.utils:get_attr_wrapped_model": "(model, attr, allow_none=True, return_model_obj=False)",
        "megatron.core.utils:get_batch_on_this_cp_rank": (
            "takes batch, is_hybrid_cp, cp_group, use_per_sequence_balancing"
        ),
        "megatron.core.utils:get_batch_on_this_tp_rank": (
            "takes batch, has_cu_seqlens, is_hybrid_cp, create_attention_mask_in_dataloader, broadcast_src_rank, "
            "broadcast_group, cp_size, tp_rank, micro_batch_size, seq_length, mtp_on_this_rank, "
            "pipeline_model_parallel_size, is_pipeline_first_stage, is_pipeline_last_stage"
        ),
        "megatron.training.argument_utils:gpt_config_from_args": "takes args",
        "megatron.training.argument_utils:hybrid_config_from_args": "takes args",
        "megatron.training.argument_utils:pretrain_cfg_container_from_args": "(args, model_cfg=None)",
        "megatron.training.arguments:parse_and_validate_args": (
            "(extra_args_provider=None, ignore_unknown_args=False, args_defaults={})"
        ),
        "megatron.training.datasets.sft_dataset:SFTDataset": "class",
        "megatron.training.training:update_seqlen_stats_from_cu_seqlens": "(cu_seqlens)",
        "megatron.training.utils:get_blend_and_blend_per_split": "(args)",
        "megatron.training.utils:is_first_or_last_pipeline_stage": "(vp_stage)",
        "megatron.training:get_args": "()",
        "megatron.training:get_timers": "()",
        "megatron.training:get_tokenizer": "()",
        "megatron.training:pretrain": (
            "takes cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, get_embedding_ranks"
        ),
        "megatron.training:set_startup_timestamps": "takes program_start, main_entry",
    },
}
"""Symbols that our sources import by name; a test compares the list with the sources."""

_DATA_PARALLEL = "megatron.core.distributed"
_ROPE = "megatron.core.models.common.embeddings.rope_utils"
_MOE = "megatron.core.transformer.moe.moe_utils"

REACHED: dict[str, dict[str, str]] = {
    "model": {
        "megatron.core.models.gpt:GPTModel.forward": (
            "takes self, input_ids, position_ids, attention_mask, labels, loss_mask"
        ),
        "megatron.core.models.gpt:GPTModel._preprocess": "present",
        "megatron.core.models.gpt:GPTModel._postprocess": "present",
        "megatron.core.models.gpt:GPTModel._scale_logits": "(self, logits)",
        "megatron.core.models.gpt:GPTModel.compute_language_model_loss": "(self, labels, logits)",
        "megatron.core.models.hybrid.hybrid_model:HybridModel.forward": (
            "takes self, input_ids, position_ids, attention_mask, labels, loss_mask"
        ),
        "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward": (
            "takes self, input_ids, position_ids"
        ),
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward": (
            "takes self, input_ids, position_ids, hidden_states, attention_mask, embedding"
        ),
        "megatron.training.models.gpt:GPTModelBuilder.build_model": (
            "(self, pg_collection, pre_process=None, post_process=None, vp_stage=None)"
        ),
        "megatron.training.models.hybrid:HybridModelBuilder.build_model": (
            "(self, pg_collection, pre_process=None, post_process=None, vp_stage=None)"
        ),
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.get_layer_offset": (
            "takes self, layer_type, vp_stage, pp_rank"
        ),
        "megatron.core.transformer.transformer_config:TransformerConfig": (
            "takes hidden_size, params_dtype, use_cpu_initialization, init_method, use_mup, mtp_num_layers, "
            "softmax_type, window_size, context_parallel_size, attention_dropout, sequence_parallel, enable_autocast, "
            "variable_seq_lengths, num_microbatches_with_partial_activation_checkpoints, fp8_param, "
            "fp8_dot_product_attention, fp8_multi_head_attention"
        ),
    },
    "platform": {
        "megatron.core.utils:_te_version": "value",
        "megatron.core.utils:PkgVersion": "class",
        f"{_ROPE}:fused_apply_rotary_pos_emb": "present",
        f"{_ROPE}:fused_apply_rotary_pos_emb_thd": "present",
        f"{_MOE}:fused_permute": "present",
        f"{_MOE}:fused_permute_with_probs": "present",
        f"{_MOE}:fused_sort_chunks_by_index": "present",
        f"{_MOE}:fused_sort_chunks_by_index_with_probs": "present",
        f"{_MOE}:fused_unpermute": "present",
        f"{_MOE}:fused_compute_score_for_moe_aux_loss": "present",
        f"{_MOE}:fused_moe_aux_loss": "present",
        f"{_MOE}:fused_topk_with_score_function": "present",
    },
    "training": {
        f"{_DATA_PARALLEL}:DistributedDataParallel.no_sync": "(self)",
        f"{_DATA_PARALLEL}:DistributedDataParallel.start_grad_sync": "(self, *unused)",
        f"{_DATA_PARALLEL}.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready": (
            "(self, param, force_all_reduce=False)"
        ),
        "megatron.core.models.gpt:GPTModel.set_input_tensor": "(self, input_tensor)",
        "megatron.core.models.hybrid.hybrid_model:HybridModel.set_input_tensor": "(self, input_tensor)",
        "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch": "(self)",
        "megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward": "(self, data_iterator)",
        "megatron.core.timers:Timers": "class",
        "megatron.core.transformer.transformer_config:TransformerConfig": (
            "takes hidden_size, params_dtype, sequence_parallel, fp16, bf16, timers, barrier_with_L1_time, "
            "no_sync_func, grad_sync_func, grad_scale_func, finalize_model_grads_func, calculate_per_token_loss, "
            "deallocate_pipeline_outputs"
        ),
    },
    "pretrain_gpt_vp.py": {
        "megatron.core.rerun_state_machine:RerunStateMachine.is_unexpectedly_large": (
            "takes self, result, threshold, context"
        ),
        "megatron.core.rerun_state_machine:RerunStateMachine.validate_result": (
            "takes self, result, rejection_func, message, tolerance, fatal"
        ),
    },
}
"""Symbols that our sources use through Megatron's objects, such as methods and configuration fields."""


UNUSED = "unused"
"""Marks a symbol in `IN_SERIES` that a release series may lack, because our sources do not use it in that series."""

IN_SERIES: dict[str, dict[str, str]] = {
    "0.20": {
        "megatron.core.transformer.multi_token_prediction:roll_tensor": (
            "(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None, return_sum=True)"
        ),
    },
}
"""For each release series of megatron-core, the symbols whose expected entry differs from the tables above."""


def rooms() -> list[str]:
    """The names of the packages that use Megatron, and of the training script."""
    return list(dict.fromkeys([*IMPORTED, *REACHED]))


def count(room: str) -> int:
    """The number of Megatron's symbols that our package `room` uses with the installed release series of Megatron."""
    return len(_expected(room))


def check_symbols(room: str) -> list[Problem]:
    """Check the Megatron symbols that our package `room` uses, and return those that are missing or not as expected."""
    problems = (check_symbol(target, expected) for target, expected in _expected(room))
    return [problem for problem in problems if problem is not None]


def _expected(room: str) -> list[tuple[str, str]]:
    different = IN_SERIES.get(present_series(), {})
    used = [*IMPORTED.get(room, {}).items(), *REACHED.get(room, {}).items()]
    here = [(target, different.get(target, expected)) for target, expected in used]
    return [(target, expected) for target, expected in here if expected != UNUSED]
