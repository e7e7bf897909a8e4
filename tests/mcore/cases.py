"""What is tested together with our schedules, as data: a case is a line here and a row of docs/compatibility.md.

`test_combinations.py` runs every case against plain Megatron on the same ranks with the same options;
`scripts/compatibility.py` writes the page.
"""

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
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
LOCAL_FP32 = {"grad_reduce_in_bf16": True, "ddp_param_name_patterns_for_fp32_local_accumulation": ["all"]}

CASES = (
    Case("data parallelism", ranks=4, slow=True),
    Case("overlapped gradient reduction", OVERLAPPED, ranks=4, slow=True),
    Case("distributed optimizer", DISTRIBUTED, ranks=4, slow=True),
    Case("distributed optimizer, everything overlapped", BOTH, EVERY_SHAPE + WHOLE_LAYERS, ranks=4),
    Case("everything overlapped, tied, several chunks", {**BOTH, **TIED}, ("v-half/vocab-2", "zb-h1/none"), ranks=4),
    Case("the same, not aligned between ranks", {**BOTH, "no_align_grad_reduce": True}, ranks=4, slow=True),
    Case("everything overlapped, bf16, tied", {**BOTH, **TIED, "bf16": True}, ranks=4),
    Case("loss averaged over tokens", {"calculate_per_token_loss": True}, ranks=4),
    Case("tensor parallelism", TENSOR, (*EVERY_SHAPE, "1f1b/vocab-1", "v-half/vocab-1", *WHOLE_LAYERS), ranks=4),
    Case("tensor parallelism, tied", {**TENSOR, **TIED}, ranks=4, slow=True),
    Case(
        "tensor and sequence parallelism",
        {**SEQUENCE, "position_embedding_type": "rope"},
        ("v-half/vocab-2", "interleaved/vocab-1", "1f1b/vocab-2", "1f1b/vocab-1", *WHOLE_LAYERS),
        ranks=4,
    ),
    Case(
        "tensor and sequence parallelism, learned positions, tied",
        {**SEQUENCE, **TIED},
        ("1f1b/vocab-2", "zb-h1/none", "interleaved/none"),
        ranks=4,
        slow=True,
    ),
    Case(
        "tensor and sequence parallelism, distributed optimizer, everything overlapped",
        {**SEQUENCE, **BOTH},
        EVERY_SHAPE + WHOLE_LAYERS,
        ranks=8,
        slow=True,
    ),
    Case(
        "tensor parallelism, multi-token prediction",
        {**TENSOR, "mtp_num_layers": 1, "position_embedding_type": "rope"},
        ranks=4,
        slow=True,
    ),
    Case(
        "tensor and sequence parallelism, multi-token prediction",
        {**SEQUENCE, **AHEAD},
        ("1f1b/vocab-2", "v-half/vocab-1", "zb-h1/none", "interleaved/none"),
        ranks=4,
        slow=True,
    ),
    Case("context parallelism", CONTEXT, EVERY_SHAPE + WHOLE_LAYERS, ranks=4, slow=True),
    Case(
        "context parallelism, multi-token prediction",
        {**CONTEXT, **AHEAD},
        ("1f1b/vocab-2", "v-half/vocab-1", "interleaved/vocab-2", "zb-h1/vocab-2", "zb-h1/none"),
        ranks=4,
    ),
    Case(
        "context, tensor and sequence parallelism, multi-token prediction, tied",
        {**CONTEXT, **SEQUENCE, **AHEAD, **TIED},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=8,
        slow=True,
    ),
    Case(
        "context and expert parallelism, multi-token prediction, full recomputation",
        {**CONTEXT, **EXPERT, **AHEAD, **FULL_RECOMPUTE},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=4,
        slow=True,
    ),
    Case(
        "four context-parallel ranks, multi-token prediction, losses masked and averaged over tokens",
        {**CONTEXT, **AHEAD, "context_parallel_size": 4, "calculate_per_token_loss": True, "eod_mask_loss": True},
        ("1f1b/vocab-1", "v-half/vocab-2"),
        ranks=8,
        slow=True,
    ),
    Case(
        "context, tensor and sequence parallelism, tied, everything overlapped",
        {**CONTEXT, **SEQUENCE, **TIED, **BOTH},
        ("v-half/vocab-2", "zb-h1/none"),
        ranks=8,
        slow=True,
    ),
    Case("mixture of experts", MOE, ("v-half/vocab-2", "1f1b/vocab-2", "interleaved/vocab-1", *WHOLE_LAYERS)),
    Case(
        "mixture of experts, multi-token prediction",
        {**MOE, **AHEAD},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        slow=True,
    ),
    Case("mixture of experts, fp16, loss scaling", {**MOE, "fp16": True, "initial_loss_scale": 1024}, slow=True),
    Case(
        "mixture of experts, full recomputation, router z-loss, losses averaged over tokens",
        {**MOE, **FULL_RECOMPUTE, "moe_z_loss_coeff": 1e-3, "calculate_per_token_loss": True},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        slow=True,
    ),
    Case(
        "mixture of experts, 32 of them, one a token, everything overlapped",
        {**MOE, **BOTH, "num_experts": 32, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        ranks=4,
        slow=True,
    ),
    Case(
        "mixture of experts, sigmoid router with bias, shared expert, dense layers between",
        {**MOE, **SIGMOID_ROUTER, "moe_shared_expert_intermediate_size": 64, "moe_layer_freq": 2},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        slow=True,
    ),
    Case(
        "expert parallelism, everything overlapped",
        {**EXPERT, **BOTH},
        EVERY_SHAPE + WHOLE_LAYERS,
        ranks=4,
        slow=True,
    ),
    Case(
        "expert, tensor and sequence parallelism",
        {**EXPERT, **SEQUENCE},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        ranks=8,
        slow=True,
    ),
    Case(
        "expert parallelism by all-to-all, everything overlapped",
        {**ALL_TO_ALL, **BOTH},
        ("v-half/vocab-2", "1f1b/vocab-2", "interleaved/vocab-1", *WHOLE_LAYERS),
        ranks=4,
    ),
    Case(
        "expert parallelism by all-to-all over tensor ranks, sequence parallelism, experts without tokens",
        {**ALL_TO_ALL, **SEQUENCE, "expert_tensor_parallel_size": 1, "num_experts": 32, "moe_router_topk": 1}
        | {"moe_router_pre_softmax": True},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        ranks=4,
        slow=True,
    ),
    Case(
        "expert parallelism by all-to-all, tensor and sequence parallelism",
        {**ALL_TO_ALL, **SEQUENCE},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        ranks=8,
        slow=True,
    ),
    Case(
        "expert parallelism by all-to-all, shared expert overlapped, tokens dropped beyond an expert's capacity",
        {**ALL_TO_ALL, **OVERLAPPED_EXPERT, "moe_expert_capacity_factor": 1.0},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        ranks=4,
        slow=True,
    ),
    Case(
        "expert parallelism by all-to-all, experts padded to their capacity, full recomputation, bf16",
        {**ALL_TO_ALL, **FULL_RECOMPUTE, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
        | {"bf16": True},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=4,
        slow=True,
    ),
    Case("full recomputation", FULL_RECOMPUTE, EVERY_SHAPE),
    Case("Llama-like: RMSNorm, SwiGLU, grouped queries, rotary positions, no biases", LLAMA),
    Case("selective recomputation", {"recompute_granularity": "selective"}, EVERY_SHAPE + WHOLE_LAYERS, slow=True),
    Case("fp16, loss scaling, steps skipped at overflow", OVERFLOW, ("1f1b/vocab-2", "v-half/vocab-1"), slow=True),
    Case(
        "bf16 main gradients",
        {**BOTH, "bf16": True, "grad_reduce_in_bf16": True},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=4,
        slow=True,
    ),
    Case("bf16, gradients accumulated in fp32 and reduced in bf16", {"bf16": True, **LOCAL_FP32}, ranks=4, slow=True),
    Case(
        "gradients in many buckets, averaged by the collective",
        {**BOTH, "ddp_bucket_size": 2000, "ddp_average_in_collective": True},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=4,
        slow=True,
    ),
    Case("dropout", DROPOUT, ("1f1b/vocab-2", "zb-h1/none", "interlaced/vocab-1"), slow=True),
    Case("dropout, full recomputation", {**DROPOUT, **FULL_RECOMPUTE}, ("1f1b/vocab-2", "zb-h1/none"), slow=True),
    Case(
        "dropout, tensor and sequence parallelism",
        {**DROPOUT, **SEQUENCE},
        ("1f1b/vocab-2", "zb-h1/none"),
        ranks=4,
        slow=True,
    ),
    Case(
        "a batch that grows with the tokens seen, evaluation in other sizes",
        GROWING,
        ("v-half/vocab-1", "1f1b/vocab-2", "interleaved/none"),
        slow=True,
    ),
    Case("the same on tensor ranks", {**TENSOR, **GROWING}, ranks=4, slow=True),
    Case(
        "positions, attention masks and losses that begin anew with every document",
        DOCUMENTS,
        ("1f1b/vocab-2", "zb-h1/none"),
        slow=True,
    ),
    Case("no positions", {"position_embedding_type": "none"}, slow=True),
    Case("YaRN, sliding window", {"position_embedding_type": "yarn", "window_size": "(8,0)"}, slow=True),
    Case(
        "selective recomputation of attention and MLP, no biases",
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "disable_bias_linear": True},
        ("1f1b/vocab-2", "v-half/vocab-2", "zb-h1/none"),
        slow=True,
    ),
    Case(
        "full recomputation, saved activations spread over tensor ranks",
        {**TENSOR, **FULL_RECOMPUTE, "distribute_saved_activations": True},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=4,
        slow=True,
    ),
    Case(
        "mixture of experts, balance within a sequence, its layers recomputed",
        {**MOE, "moe_router_load_balancing_type": "seq_aux_loss", "moe_layer_recompute": True},
        ("1f1b/vocab-2", "zb-h1/none"),
        slow=True,
    ),
    Case("ranks in the order tensor, pipeline, data", {**TENSOR, "use_tp_pp_dp_mapping": True}, ranks=8, slow=True),
    Case(
        "context parallelism, loss averaged over tokens",
        {**CONTEXT, "calculate_per_token_loss": True},
        ranks=4,
        slow=True,
    ),
    Case(
        "multi-token prediction by one repeated layer, losses averaged over tokens",
        {**AHEAD, "mtp_use_repeated_layer": True, "mtp_loss_scaling_factor": 0.7, "calculate_per_token_loss": True},
        ("1f1b/vocab-2", "v-half/vocab-2"),
        ranks=4,
        slow=True,
    ),
    Case("SGD, no clipping, growing weight decay", SGD, slow=True),
    Case("uneven layers", {"decoder_last_pipeline_num_layers": 1}),
    Case("a layout of uneven stages", {"pipeline_model_parallel_layout": "Et|tttL"}, ONE_CHUNK, slow=True),
    Case(
        "a layout of uneven chunks, some empty, the vocabulary layers alone",
        {"pipeline_model_parallel_layout": "E|t|t||t||t|L", "global_batch_size": 16},
        ("interleaved/vocab-2", "v-half/vocab-1", "interleaved/none", "v-half/none"),
        ranks=4,
        size=4,
        slow=True,
    ),
    Case(
        "data and tensor parallelism, distributed optimizer",
        {**TENSOR, **DISTRIBUTED},
        EVERY_SHAPE + WHOLE_LAYERS,
        ranks=8,
        slow=True,
    ),
    Case("decoupled learning rate, weight decay", GROUPS),
    Case("MuP", MUP, EVERY_SHAPE),
    Case("MuP, tied", {**MUP, **TIED}, slow=True),
    Case("multi-token prediction, everything overlapped, bf16", {**AHEAD, **BOTH, "bf16": True}, ranks=4, slow=True),
    Case("multi-token prediction, fp16, loss scaling", {**AHEAD, "fp16": True, "initial_loss_scale": 1024}, slow=True),
    Case("multi-token prediction, full recomputation", {**AHEAD, **FULL_RECOMPUTE}, slow=True),
    Case(
        "hybrid model, everything overlapped, bf16, tied", {**HYBRID, **BOTH, **TIED, "bf16": True}, ranks=4, slow=True
    ),
)
