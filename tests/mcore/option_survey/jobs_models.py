"""Jobs of the option survey about models: vocabularies, layers, multi-token prediction, experts, hybrid models."""

from __future__ import annotations

import json

from tests.mcore.case_parts import AHEAD, FULL_RECOMPUTE, HYBRID, LLAMA, MOE, SEQUENCE, TENSOR, TIED
from tests.mcore.option_survey.job import FEWER_CHUNKS, HALF, LOCAL_INIT, MANY_WAYS, ONE_CHUNK, Job

_COUNTED = "multi-token prediction hits are counted from the start of a run"
ROPE = {"position_embedding_type": "rope"}
MUP = {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4, "mup_attn_scale_power": 0.5}
MUP |= {"mup_embedding_mult": 2.0, "mup_output_mult": 0.3}
LONG_HYBRID = {**HYBRID, "hybrid_layer_pattern": "*-*-*-*-"}
EXPERTS = {**MOE, "moe_per_layer_logging": True}


def _block(attention: str, mlp: str) -> dict[str, object]:
    """A layer of a heterogeneous model; each part is `whole`, `linear` or `none`."""
    parts = {
        "attention": {"n_heads_in_group": 2 if attention == "whole" else None},
        "ffn": {"ffn_mult": 2.0 if mlp == "whole" else None},
    }
    for part, kind in zip(parts.values(), (attention, mlp), strict=True):
        part |= {"no_op": kind == "none", "replace_with_linear": kind == "linear"}
    return parts


def _heterogeneous(*blocks: tuple[str, str], tied: bool = False) -> dict[str, object]:
    config = {
        "hidden_act": "silu",
        "num_hidden_layers": len(blocks),
        "hidden_size": 32,
        "num_attention_heads": 4,
        "tie_word_embeddings": tied,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": [_block(*block) for block in blocks],
    }
    return {
        "heterogeneous_layers_config_encoded_json": json.dumps(config),
        "num_layers": len(blocks),
        "swiglu": True,
        "normalization": "RMSNorm",
        "group_query_attention": True,
        "num_query_groups": 2,
        "use_rotary_position_embeddings": True,
        "use_rope_scaling": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not tied,
        **ROPE,
    }


BLOCKS = (("whole", "whole"), ("none", "whole"), ("linear", "linear"), ("whole", "none"))

LAYERS = (
    Job(
        "SwiGLU with an offset and a clamp, interleaved rotary positions in part, scaled",
        {
            "swiglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "rotary_interleaved": True,
            **ROPE,
        }
        | {"rotary_percent": 0.5, "use_rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 5000}
        | {"attention_softmax_in_fp32": True},
    ),
    Job(
        "positions and windows by layer number",
        {**ROPE, "no_rope_freq": 2, "window_size": "(8,0)", "window_attn_skip_freq": 2},
        MANY_WAYS,
    ),
    Job(
        "positions and windows by layer number, p = 4",
        {**ROPE, "no_rope_freq": 2, "window_size": "(8,0)"} | {"window_attn_skip_freq": 2, "num_layers": 8},
        ranks=4,
        size=4,
    ),
    Job(
        "gated attention output, norms of queries and keys, quick GEGLU",
        {**ROPE, "attention_output_gate": True, "qk_l2_norm": True, "quick_geglu": True},
    ),
    Job(
        "learnable softmax, interpolated positions",
        {**ROPE, "softmax_type": "learnable"} | {"rotary_seq_len_interpolation_factor": 2, "init_method_std": 0.05},
    ),
    Job(
        "MLP in chunks, biases of queries, keys and values, wide heads",
        {"mlp_chunks_for_training": 2, "add_qkv_bias": True, "kv_channels": 12, "group_query_attention": True}
        | {"num_query_groups": 2, "ffn_hidden_size": 96},
    ),
    Job("squared ReLU, no biases", {"squared_relu": True, "disable_bias_linear": True, "norm_epsilon": 1e-6}),
    Job("Llama-like, p = 3", LLAMA, ranks=3, size=3),
    Job("Llama-like, p = 4, tied", {**LLAMA, **TIED}, ranks=4, size=4),
    Job(
        "YaRN",
        {"position_embedding_type": "yarn", "yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 32.0}
        | {"yarn_beta_slow": 1.0, "rotary_scaling_factor": 2.0, "no_yarn_correction_range_round_to_int": True},
    ),
    Job("no positions", {"position_embedding_type": "none"}),
    Job("positions by an older flag", {"use_rotary_position_embeddings": True, "no_position_embedding": True}),
    Job("fused attention of PyTorch", {"core_attention": "sdpa", **ROPE}),
    Job(
        "recomputed by blocks",
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1} | {"num_layers": 8},
    ),
    Job("recomputed uniformly, p = 3", {**FULL_RECOMPUTE, "num_layers": 6}, ranks=3, size=3),
    Job(
        "recomputed in parts",
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "disable_bias_linear": True},
    ),
    Job("recomputed by an older flag", {"recompute_activations": True}),
    Job("weights made on the CPU", {"use_cpu_initialization": True}),
    Job("weights made on the CPU, tensor ranks", {"use_cpu_initialization": True, **TENSOR}, ranks=4),
    Job("sequence parallelism", {**SEQUENCE, **ROPE, "no_clone_scatter_output_in_embedding": True}, ranks=4),
    Job("other random number trackers", {"te_rng_tracker": True}),
    Job(
        "a random number tracker that keeps no state, resumed",
        {"inference_rng_tracker": True},
        then={"train_iters": 8, "no_load_rng": True, "override_opt_param_scheduler": True},
    ),
    Job(
        "heterogeneous layers",
        _heterogeneous(*BLOCKS),
        ONE_CHUNK,
        why="Megatron supports such layers only with one chunk per rank",
        default=("1f1b/vocab-2",),
    ),
    Job(
        "heterogeneous layers, p = 3, tied",
        _heterogeneous(*BLOCKS, *BLOCKS[:2], tied=True),
        ONE_CHUNK,
        ranks=3,
        size=3,
        why="Megatron supports such layers only with one chunk per rank",
    ),
)

VOCABULARIES = (
    Job(
        "tied, nothing padded, wide embeddings, little clipped",
        {**TIED, "vocab_size": 512, "embedding_init_method_std": 0.2, "clip_grad": 0.05},
    ),
    Job("a padding of one's own", {"padded_vocab_size": 777}),
    Job("a padding of one's own, p = 3", {"padded_vocab_size": 777}, ranks=3, size=3),
    Job(
        "another end of a document, losses masked at it",
        {"make_vocab_size_divisible_by": 3, "null_tokenizer_eod_id": 7, "eod_mask_loss": True}
        | {"reset_position_ids": True},
    ),
    Job("MuP", {**MUP, "decoupled_lr": 3e-4}, MANY_WAYS),
    Job("MuP, tied", {**MUP, **TIED}),
    Job(
        "MuP by a factor, p = 3", {"use_mup": True, "mup_base_hidden_size": 8, "mup_output_mult": 2.0}, ranks=3, size=3
    ),
    Job(
        "MuP with SGD and a further head",
        {**MUP, "optimizer": "sgd", "mtp_num_layers": 1, **ROPE},
        by_name=True,
        why="Megatron cannot load the state of SGD",
    ),
    Job(
        "two further heads",
        {**AHEAD, "mtp_loss_scaling_factor": 0.5},
        ("1f1b/vocab-2", "v-half/vocab-1", "zb-h1/none"),
        by_name=True,
        why=_COUNTED,
    ),
    Job(
        "one further head, interleaved",
        {**AHEAD, "mtp_num_layers": 1},
        ("interleaved/vocab-2", "interleaved/none"),
        by_name=True,
        why=_COUNTED,
    ),
    Job(
        "a further head used twice, p = 3",
        {**AHEAD, "mtp_use_repeated_layer": True},
        ranks=3,
        size=3,
        by_name=True,
        why=_COUNTED,
    ),
    Job(
        "further heads, p = 4, losses averaged over tokens",
        {**AHEAD, "calculate_per_token_loss": True},
        ranks=4,
        size=4,
        by_name=True,
        why=_COUNTED,
    ),
    Job(
        "losses averaged over tokens, masked",
        {"calculate_per_token_loss": True, "eod_mask_loss": True} | {"null_tokenizer_eod_id": 7},
    ),
)

MIXTURES = (
    Job(
        "experts: balance over all, z-loss, dense layers between, logged per layer",
        {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss", "moe_z_loss_coeff": 1e-3}
        | {"moe_layer_freq": "([0,1,1,1])"},
        MANY_WAYS,
    ),
    Job(
        "experts: three balances at once, groups of experts, router in fp64",
        {**EXPERTS, "num_experts": 8, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"]}
        | {"moe_aux_loss_coeff": [0.1, 0.05, 0.01], "moe_router_num_groups": 4, "moe_router_group_topk": 2}
        | {"moe_router_dtype": "fp64", "moe_router_topk_scaling_factor": 1.5, "moe_router_score_function": "sigmoid"},
    ),
    Job(
        "experts: sinkhorn, a shared expert with a gate",
        {**EXPERTS, "moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
        | {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True, "moe_ffn_hidden_size": 48},
    ),
    Job(
        "experts: a capacity, dropped by position, padded, all-to-all",
        {**EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
        | {"moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"}
        | {"calculate_per_token_loss": True},
    ),
    Job(
        "experts: biases of the router updated, probabilities on the input",
        {**EXPERTS, "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        | {"moe_router_bias_update_rate": 0.01, "moe_apply_probs_on_input": True, "moe_router_dtype": "fp32"},
    ),
    Job(
        "experts: balance by force",
        {**EXPERTS, "moe_router_force_load_balancing": True},
        LOCAL_INIT,
        why="forced routes are random numbers, drawn in the order of the passes",
    ),
    Job("experts: routes replayed", {**EXPERTS, "moe_enable_routing_replay": True}),
    Job(
        "experts: quantile balancing",
        {**EXPERTS, "moe_router_load_balancing_type": "quantile_balancing"}
        | {"moe_aux_loss_coeff": 0.0, "moe_router_quantile_balancing_ema": 0.5},
    ),
    Job(
        "experts: jitter",
        {**EXPERTS, "moe_input_jitter_eps": 0.01},
        LOCAL_INIT,
        why="jitter is drawn in the order of the passes",
    ),
    Job(
        "experts: softmax before the choice, layers recomputed",
        {**EXPERTS, "moe_router_pre_softmax": True} | {"moe_layer_recompute": True},
        ONE_CHUNK,
    ),
    Job("experts: square roots of softplus", {**EXPERTS, "moe_router_score_function": "sqrtsoftplus"}),
    Job("experts: p = 3, logged per layer", {**EXPERTS, "num_layers": 6, "moe_z_loss_coeff": 1e-3}, ranks=3, size=3),
    Job("experts: p = 4, tied", {**EXPERTS, **TIED, "num_layers": 8}, ranks=4, size=4),
    Job(
        "experts on two ranks",
        {**EXPERTS, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
        ranks=4,
    ),
    Job("experts on tensor ranks", {**EXPERTS, **SEQUENCE, "expert_tensor_parallel_size": 1}, ranks=4),
    Job(
        "experts and a further head",
        {**EXPERTS, **AHEAD, "mtp_num_layers": 1},
        FEWER_CHUNKS,
        by_name=True,
        why=_COUNTED,
    ),
    Job(
        "tokens per expert saved",
        {**EXPERTS, "save_tokens_per_expert_interval": 2, "save": "{folder}/tokens", "save_interval": 1000},
        ONE_CHUNK,
    ),
)

HYBRIDS = (
    Job("hybrid", LONG_HYBRID, MANY_WAYS),
    Job("hybrid, p = 3, tied", {**LONG_HYBRID, **TIED, "hybrid_layer_pattern": "*-*-*-"}, ranks=3, size=3),
    Job("hybrid, p = 4", LONG_HYBRID, ranks=4, size=4),
    Job("hybrid, an iteration skipped", {**LONG_HYBRID, "iterations_to_skip": [4]}),
    Job("hybrid, decoupled rates, cosine", {**LONG_HYBRID, "decoupled_lr": 2e-3, "lr_decay_style": "cosine"}),
    Job(
        "hybrid, bf16",
        {**LONG_HYBRID, "bf16": True},
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 4e-3",
    ),
    Job("hybrid, tensor parallelism", {**LONG_HYBRID, **TENSOR}, ranks=4),
    Job(
        "hybrid, further heads",
        {**LONG_HYBRID, "hybrid_layer_pattern": "*-*-*-*-/*-/*-", "mtp_loss_scaling_factor": 0.5},
        (*ONE_CHUNK, "interleaved/vocab-2"),
        by_name=True,
        why="Megatron builds the prediction heads of a hybrid model on the last rank, but a V shape ends on the first",
    ),
)
