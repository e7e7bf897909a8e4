"""The parts of the cases in `cases.py`: the options that they combine, and the schedules under which they run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

BASIC = ("1f1b/vocab-2",)
EVERY_SHAPE = ("1f1b/vocab-2", "interleaved/vocab-1", "v-half/vocab-2")
ONE_CHUNK = ("1f1b/vocab-2", "zb-h1/vocab-1", "zb-h1/none")
WHOLE_LAYERS = ("zb-h1/none", "v-half/none", "interleaved/none")
FP32 = 1e-6


@dataclass(frozen=True)
class Case:
    """One combination of Megatron's options.

    name: the row's title on the page.
    options: long argument names with underscores, for plain Megatron and for our run alike.
    methods: `schedule/algorithm`, `none` without --vocab-parallel; the first one runs by default, the others with
        `-m slow`.
    ranks, size: processes, and p of them in a pipeline.
    slow: the first method runs with `-m slow` only, too.
    bound: largest relative distance of a loss, a gradient norm or a parameter's gradient in fp32. Half precision is
        compared with the rounding that plain Megatron itself shows against fp32.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    methods: tuple[str, ...] = BASIC
    ranks: int = 2
    size: int = 2
    slow: bool = False
    bound: float = FP32

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        parts = (int(self.options.get(f"{kind}_parallel_size", 1)) for kind in ("tensor_model", "context"))
        return self.ranks // math.prod(parts, start=self.size)

    @property
    def precision(self) -> str | None:
        """`bf16`, `fp16`, or None for fp32."""
        return next((name for name in ("bf16", "fp16") if self.options.get(name)), None)


TIED = {"untie_embeddings_and_output_weights": False}
OVERLAPPED = {"overlap_grad_reduce": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
BOTH = {**OVERLAPPED, **DISTRIBUTED, "overlap_param_gather": True}
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
MUP = {"use_mup": True, "mup_base_hidden_size": 32, "mup_output_mult": 0.3, "mup_embedding_mult": 2.0}
AHEAD = {"mtp_num_layers": 2, "position_embedding_type": "rope"}
HYBRID = {
    "num_layers": None,
    "hybrid_layer_pattern": "*-|*-",
    "spec": ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"],
    "position_embedding_type": "rope",
}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "disable_bias_linear": True,
}
OVERFLOW = {"fp16": True, "initial_loss_scale": 2**21, "hysteresis": 1}
EXPERT = {**MOE, "expert_model_parallel_size": 2}
ALL_TO_ALL = {**EXPERT, "moe_token_dispatcher_type": "alltoall"}
OVERLAPPED_EXPERT = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
SIGMOID_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CONTEXT = {"context_parallel_size": 2, "core_attention": "sdpa", "position_embedding_type": "rope"}
LATENT = {
    **{"multi_latent_attention": True, "core_attention": "sdpa", "position_embedding_type": "rope"},
    **{"normalization": "RMSNorm", "qk_layernorm": True, "q_lora_rank": 32, "kv_lora_rank": 16},
    **{"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12},
}
DEEPSEEK = {
    **LATENT,
    **ALL_TO_ALL,
    **SIGMOID_ROUTER,
    "expert_model_parallel_size": 1,
    "swiglu": True,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_dtype": "fp32",
}
"""DeepSeek-V3's layers: one dense, then experts beside a shared one."""
GROUPS = {"decoupled_lr": 1e-4, "weight_decay": 10}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
GROWING = {
    "step_batch_size_schedule": "0:4 1024:8 2560:12",  # from so many tokens on
    "global_batch_size": None,
    "train_iters": 8,
    "eval_global_batch_size": 5,
    "eval_micro_batch_size": 1,
}
SGD = {
    "optimizer": "sgd",
    "clip_grad": 0,
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.0,
    "end_weight_decay": 10.0,
}
MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "high"}
"""In the exactest precision that Megatron offers: the others round its products as bf16 does."""
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
LOCAL_FP32 = {"grad_reduce_in_bf16": True, "ddp_param_name_patterns_for_fp32_local_accumulation": ["all"]}
