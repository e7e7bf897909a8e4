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
SIGMOID_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CONTEXT = {"context_parallel_size": 2, "core_attention": "sdpa", "position_embedding_type": "rope"}
GROUPS = {"decoupled_lr": 1e-4, "weight_decay": 10}

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


@dataclass(frozen=True)
class Proof:
    """A row of the page whose cases live in another test: what it says, and `file::function` under tests/."""

    name: str
    test: str


_PARITY = "mcore/test_parity.py::test_parity"
PROOFS = (
    Proof(
        "every schedule with vocab-1 and vocab-2, and without `--vocab-parallel`; p = 2, 3, 4, 8; any number of "
        "microbatches",
        _PARITY,
    ),
    Proof("tied and untied; learned and rotary positions; loss masks", _PARITY),
    Proof("a vocabulary that p does not divide; empty stages", _PARITY),
    Proof("gradient clipping, Adam; evaluation between training steps", _PARITY),
    Proof(
        "bf16 and fp16: as close to fp32 as plain Megatron is",
        "mcore/test_parity.py::test_half_precision_is_as_close_to_fp32_as_plain_megatron",
    ),
    Proof(
        "checkpoints (`torch_dist`) between plain and vocabulary-parallel runs and other p, optimizer state included "
        "(with the distributed optimizer: `--dist-ckpt-optim-fully-reshardable`)",
        "mcore/test_checkpoints.py::test_training_continues_as_if_nothing_had_happened",
    ),
    Proof(
        "a run resumed at its own layout, bit for bit, also with the distributed optimizer's default form",
        "mcore/test_checkpoints.py::test_resuming_at_the_same_layout_gives_the_same_bits",
    ),
    Proof(
        "two runs give the same bits, losses, gradients and weights, also under `--deterministic-mode`",
        "mcore/test_determinism.py::test_two_runs_give_the_same_bits",
    ),
    Proof(
        "a rank that is killed in a pass: the others end and name pass, microbatch and rank that they waited for",
        "mcore/test_faults.py::test_when_a_rank_is_killed_the_others_say_where_they_waited",
    ),
    Proof(
        "ranks started again by `torchrun --max-restarts` go on with the same losses, bit for bit",
        "mcore/test_faults.py::test_ranks_that_a_launcher_starts_again_go_on_with_the_same_losses",
    ),
    Proof(
        "a rank that stands still is named by the others",
        "mcore/test_faults.py::test_a_stopped_rank_is_named_by_the_others",
    ),
    Proof("data that does not come", "mcore/test_faults.py::test_a_rank_whose_data_hangs_says_so"),
    Proof("an exception in a pass", "mcore/test_faults.py::test_a_defect_keeps_its_traceback_and_ends_all_ranks"),
    Proof("SIGTERM", "mcore/test_faults.py::test_a_rank_that_is_told_to_end_says_where_it_was"),
    Proof(
        "SIGTERM under `--exit-signal-handler`: saved after the iteration, status 0, the same losses after it",
        "mcore/test_faults.py::test_sigterm_saves_after_the_iteration_and_the_run_goes_on_from_there",
    ),
    Proof(
        "a rank that dies in a save, synchronous or asynchronous (`--async-strategy mcore`): the run goes on from the "
        "checkpoint before, bit for bit",
        "mcore/test_save_faults.py::test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before_and_the_run_goes_on_from_it",
    ),
    Proof(
        "a full disk in a save: status 1 and one line on every rank, the checkpoint before untouched and the last one",
        "mcore/test_save_faults.py::test_a_disk_that_is_full_leaves_the_checkpoint_before",
    ),
    Proof(
        "a rank that dies while it writes which checkpoint is the last",
        "mcore/test_save_faults.py::test_a_rank_that_dies_while_it_names_the_last_checkpoint_leaves_the_name_before",
    ),
    Proof(
        "a checkpoint that is missing, damaged or does not fit; a directory that takes no files",
        "mcore/test_checkpoints.py::test_what_is_no_checkpoint_or_does_not_fit_is_refused_before_anything_starts",
    ),
    Proof(
        "NaN or infinity in a loss, named with rank and microbatch, and the pass that made it",
        "mcore/test_bad_numbers.py::test_a_loss_that_is_no_number_is_named_with_rank_and_microbatch_and_so_is_where_it_was_born",
    ),
    Proof(
        "after such a loss the run ends as plain Megatron does",
        "mcore/test_bad_numbers.py::test_a_loss_that_is_no_number_ends_a_run_where_it_ends_plain_megatron",
    ),
    Proof(
        "overflows under dynamic loss scaling: the steps are skipped that plain Megatron skips",
        "mcore/test_bad_numbers.py::test_an_overflow_under_dynamic_loss_scaling_skips_the_step_that_plain_megatron_skips",
    ),
    Proof(
        "token ids and labels outside the vocabulary",
        "mcore/test_bad_numbers.py::test_an_id_outside_the_vocabulary_is_named",
    ),
    Proof(
        "files of data that are cut short; a vocabulary smaller than the tokenizer's",
        "mcore/test_inputs.py::test_what_does_not_fit_is_refused_on_every_rank",
    ),
    Proof(
        "data made with a larger vocabulary",
        "mcore/test_inputs.py::test_data_made_with_a_larger_vocabulary_is_named_by_its_first_id_outside",
    ),
    Proof(
        "data shorter than the run: several epochs, as in plain Megatron",
        "mcore/test_inputs.py::test_data_shorter_than_the_run_starts_over_as_in_plain_megatron",
    ),
    Proof(
        "a script with its own `model_provider`",
        "mcore/test_launch.py::test_somebodys_own_script_trains_unchanged_with_and_without_vocabulary_parallelism",
    ),
    Proof(
        "a HybridModel of attention and MLP layers (`megatron_vp.mcore.hybrid_stack`), cut by the "
        "bars of its pattern, two segments a rank in interleaved and V-shaped schedules",
        "mcore/test_hybrid.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "a hybrid model's checkpoint in plain Megatron and back",
        "mcore/test_hybrid.py::test_a_checkpoint_continues_in_plain_megatron_and_back",
    ),
    Proof(
        "multi-token prediction (`--mtp-num-layers`), tied and untied; V shapes, too",
        "mcore/test_multi_token.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "checkpoints of models with multi-token prediction in plain Megatron and back",
        "mcore/test_multi_token.py::test_a_checkpoint_continues_in_plain_megatron_and_back",
    ),
    Proof(
        "label smoothing and z-loss, against an eager loss inside plain Megatron, which has neither",
        "mcore/test_losses.py::test_losses_and_gradients",
    ),
    Proof("`--pipeline-trace`, `--rank-report`", "mcore/test_trace.py::test_the_command_reads_what_training_recorded"),
)

NOT_YET = (
    "CUDA, NCCL, several nodes",
    "Transformer Engine's layers, among them the Mamba, gated delta net and latent attention layers of hybrid models",
    "Transformer Engine's attention under `--context-parallel-size`",
    "grouped GEMMs of experts (`--moe-grouped-gemm`), the all-to-all and flex token dispatchers",
)
"""Neither tested nor refused."""
