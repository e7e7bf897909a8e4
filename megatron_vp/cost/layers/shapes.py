"""The sizes of a model and of a training job, and the plan for its pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron_vp.errors import UserError
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.row_counts import check_stage_rows, rows_per_shard
from megatron_vp.schedule import DEFAULT_SCHEDULE, Costs, ScheduleRequest, VocabMethod, family
from megatron_vp.schedule.flex import shaped


class Recompute(StrEnum):
    """Which activations are recomputed in the backward instead of being kept."""

    NONE = "none"
    FULL = "full"
    """Every layer keeps only its input and recomputes all other activations."""


class Fp8Recipe(StrEnum):
    """How Transformer Engine scales fp8 tensors (`--fp8-recipe`)."""

    TENSORWISE = "tensorwise"
    """One scale per tensor, computed from the tensor's largest value."""
    DELAYED = "delayed"
    """One scale per tensor, computed from the largest values in earlier microbatches."""
    BLOCKWISE = "blockwise"
    """One scale per 128 elements, or per block of 128 x 128 elements in weights."""
    MXFP8 = "mxfp8"
    """One scale per 32 elements; the tensor cores apply the scales."""
    NVFP4 = "nvfp4"
    """4-bit elements (`--fp4-format`) with one scale per 16 elements."""


NODE = 8
"""GPUs of a node of the published recipes, which choose their dispatcher by it."""


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-latent attention.

    key_rank: rank of the compressed keys and values.
    rotary: width of the part of a head's queries and keys that is rotated.
    value_size: width of a head's values.
    query_rank: rank of the compressed queries, or 0 if queries are not compressed.
    """

    key_rank: int
    rotary: int
    value_size: int
    query_rank: int = 0


@dataclass(frozen=True)
class Delta:
    """Sizes of a gated delta net: heads and their widths, and the length of its convolution."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a GPT-like model.

    ffn: width of an MLP, or of one expert.
    kv_groups: number of query groups, each with its own keys and values; 0: one group per head.
    head_size: width of a head's queries and keys; 0: hidden / heads.
    gated: whether an MLP has three matrices.
    pattern: one letter per layer. In a hybrid model, these are the letters of its pattern, without bars. In a GPT model
        with experts in only some layers, t is a layer with experts, and d a layer without. Empty for other models.
    dense_ffn: width of the MLPs of layers without experts (letters `-` and `d`); 0: equal to `ffn`.
    shared_ffn: width of the MLP that all tokens of a layer with experts share; 0: none.
    mtp_heads: letters of the layers of each multi-token prediction head. All heads are in one stage.
    behind_mtp: number of stages behind the one with the multi-token prediction heads.
    windowed: share of the layers in which a token sees only the last `window` tokens.
    clamped: whether the experts' activation is clamped, as in GPT-OSS.
    expert_biases: whether clamped experts have biases.
    output_gate: whether the result of attention is multiplied by a gate of the same width.
    shared_gate: whether the shared expert's result is multiplied by a gate.
    delta: sizes of the gated delta nets that replace attention in some layers.

    Raises UserError if the number of groups does not divide the number of heads, or if a token
    needs more experts than a layer has.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_groups: int = 0
    head_size: int = 0
    gated: bool = False
    tied: bool = False
    dropout: bool = False
    experts: int = 0
    experts_per_token: int = 0
    query_key_norms: bool = False
    rotary: bool = False
    pattern: str = ""
    dense_ffn: int = 0
    shared_ffn: int = 0
    latent: Latent | None = None
    mtp_heads: tuple[str, ...] = ()
    behind_mtp: int = 0
    window: int = 0
    windowed: float = 0.0
    clamped: bool = False
    expert_biases: bool = False
    output_gate: bool = False
    shared_gate: bool = False
    delta: Delta | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_groups", self.kv_groups or self.heads)
        if not self.head_size:
            if self.hidden % self.heads:
                raise UserError(
                    f"hidden size {self.hidden} cannot be divided equally among {self.heads} attention heads; set the "
                    "head size with --kv-channels"
                )
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        if self.heads % self.kv_groups:
            raise UserError(
                f"{self.heads} attention heads cannot be divided equally among {self.kv_groups} query groups; set "
                "--num-query-groups to a divisor of the number of heads"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UserError(
                f"a token cannot be routed to {self.experts_per_token} of {self.experts} experts; set "
                f"--moe-router-topk to a number from 1 to {self.experts}"
            )
        assert not self.pattern or len(self.pattern) == self.layers

    @property
    def queries(self) -> int:
        """Width of the queries: heads x head size."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of the keys: query groups x head size."""
        return self.kv_groups * self.head_size

    @property
    def value_size(self) -> int:
        """Width of one head's value."""
        return self.latent.value_size if self.latent else self.head_size

    @property
    def values(self) -> int:
        """Width of the values: query groups x value size."""
        return self.kv_groups * self.value_size

    @property
    def results(self) -> int:
        """Width of the attention's output: heads x value size."""
        return self.heads * self.value_size

    @property
    def is_hybrid(self) -> bool:
        """Whether this is a hybrid model, in which each layer is a single block, such as attention or an MLP."""
        return not set(self.pattern) <= set("tdgh")


@dataclass(frozen=True)
class Job:
    """A training job: in each step, a replica processes `microbatches` microbatches, each with `micro_batch` sequences
    of `sequence` tokens.

    pipeline, tensor, context, data, expert: parallel sizes.
    wide_gradients: whether gradients are accumulated in fp32, as Megatron does for bf16, or in the model's dtype.
    element_bytes: bytes of an element of parameters and activations.
    fp8: recipe of the layers' matrix products, except in the first `bf16_at_start` and the last `bf16_at_end` layers.
    cross_entropy: the loss of an unsplit output layer. `eager`: Megatron's unfused implementation. `native`: its fused
        one. `te`: Transformer Engine's, which keeps logits in 16 bits and overwrites them with their gradient.
        `logits`: a post-training loop computes log-probabilities and entropies from fp32 logits.
    exact_shards: whether the size of vocabulary shards is left unrounded, as in the paper's code.
    layers: the implementation of the transformer layers.
    glu_intermediates: tensors of width `ffn` that a gated MLP keeps in addition to its activation's input and result.
    wide_softmax: whether Megatron's own attention computes its softmax in fp32.
    data_overlap: whether gradients are reduced while the last backward runs.
    gather_overlap: whether parameters are gathered while the first forward runs.
    tensor_overlap: whether matrix products run while tensor ranks exchange hidden states.
    expert_overlap: whether tokens are sent to their experts while another microbatch's passes run, in the pairs of
        schedules that have some.
    expert_tensor: tensor ranks of an expert; 0: equal to `tensor`.
    fp8_parameters: whether the weights of the layers' matrix products are kept and gathered only in fp8.
    recompute_modules: parts of a layer that the backward recomputes, as `--recompute-modules` names them.
    one_queue: whether the environment has CUDA_DEVICE_MAX_CONNECTIONS=1.
    kept_bytes: bytes that a `LayerKind.PAPER` layer keeps per hidden unit of a token; 0: computed from the sizes.
    flash_attention_2: the weight of FlashAttention 2's time in the time of fused attention. The rest is that of newer
        kernels (cuDNN 9, FlashAttention 3). Between 0 and 1: the kernels are unknown.
    dispatcher: how tokens reach their experts. With `alltoall`, a token is sent once for each of its experts. With
        `flex`, as with DeepEP, it is sent once to each rank that has some of them. Empty: not given.
    kept_states: bytes that `--use-precision-aware-optimizer` keeps for each parameter that it updates; 0: the job does
        not have this option, so all states are fp32.
    takes_gradients: whether its step reads gradients in the dtype in which they were accumulated.
    capacity: tokens that experts compute, relative to those that the router sends to them.
    reserved: tokens for which the kept tensors of experts have room, relative to those that they compute.
    paged: whether the kept tensors of experts are copied to pages (`--moe-paged-stash`).
    fp8_output: whether an unsplit output layer is multiplied in fp8.
    muon: Newton-Schulz steps of the Muon optimizer; 0: another optimizer.
    graphs: what CUDA graphs replay, as `--cuda-graph-impl` names it. In a full iteration, no kernel waits for the host.
    offloaded_modules: parts of a layer whose tensors are kept in host memory, as `--offload-modules` names them.

    Raises UserError if sizes contradict each other.
    """

    model: ModelShape
    sequence: int
    micro_batch: int
    microbatches: int
    pipeline: int
    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = Recompute.NONE
    wide_gradients: bool = True
    element_bytes: int = 2
    fp8: Fp8Recipe | None = None
    bf16_at_start: int = 0
    bf16_at_end: int = 0
    cross_entropy: str = "eager"
    exact_shards: bool = False
    layers: LayerKind = LayerKind.PAPER
    glu_intermediates: int = 0
    attention_dropout: bool = False
    wide_softmax: bool = False
    data_overlap: bool = False
    gather_overlap: bool = False
    tensor_overlap: bool = False
    expert_overlap: bool = False
    expert_tensor: int = 0
    fp8_parameters: bool = False
    recompute_modules: frozenset[str] = frozenset()
    one_queue: bool = False
    kept_bytes: float = 0.0
    flash_attention_2: float = 0.0
    dispatcher: str = "alltoall"
    kept_states: int = 0
    takes_gradients: bool = False
    capacity: float = 1.0
    reserved: float = 1.0
    paged: bool = False
    fp8_output: bool = False
    muon: int = 0
    graphs: str = "none"
    offloaded_modules: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        model, t = self.model, self.tensor
        object.__setattr__(self, "expert_tensor", self.expert_tensor or t)
        ffn_ranks = self.expert_tensor if model.experts else t
        if (
            model.heads % t
            or model.ffn % ffn_ranks
            or model.dense_ffn % t
            or model.shared_ffn % t
            or (model.kv_groups % t and t % model.kv_groups)
        ):
            sizes = ", ".join(str(each) for each in (model.ffn, model.dense_ffn, model.shared_ffn) if each)
            raise UserError(
                f"tensor parallel size {t}{f' ({ffn_ranks} for experts)' if ffn_ranks != t else ''} must divide the "
                f"number of heads ({model.heads}) and each ffn size ({sizes}), and must be a divisor or a multiple of "
                f"the number of query groups ({model.kv_groups})"
            )
        if self.sequence % (self.context * (t if self.sequence_parallel else 1)):
            raise UserError(
                f"sequence length {self.sequence} must be a multiple of the context parallel size ({self.context})"
                + (f" times the tensor parallel size ({t})" if self.sequence_parallel else "")
            )
        holders = self.expert * self.expert_tensor
        if self.expert > 1 and (self.gpus_per_stage % holders or not model.experts or model.experts % self.expert):
            raise UserError(
                f"expert parallel size {self.expert} must divide the number of experts ({model.experts or 'none'}), "
                f"and its product with expert tensor parallel size {self.expert_tensor} must divide the "
                f"{self.gpus_per_stage} ranks of a pipeline stage"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.sequence * self.micro_batch // self.context

    @property
    def column(self) -> int:
        """Bytes of one element for each token of a microbatch on one rank."""
        return self.element_bytes * self.tokens

    @property
    def overlaps_experts(self) -> bool:
        """Whether Megatron can follow `expert_overlap` with these sizes."""
        return self.expert_overlap and self.expert > 1 and self.recompute is not Recompute.FULL

    @cached_property
    def units(self) -> float:
        """Elements of a microbatch's hidden states on one rank; sequence parallelism divides them by tensor ranks."""
        return self.tokens * self.model.hidden / (self.tensor if self.sequence_parallel else 1)

    @property
    def keys(self) -> int:
        """Width of the keys on one rank; more tensor ranks than query groups hold copies of the same keys."""
        return max(self.model.keys // self.tensor, self.model.head_size)

    @property
    def values(self) -> int:
        """Width of the values on one rank."""
        return max(self.model.values // self.tensor, self.model.value_size)

    @property
    def scores(self) -> float:
        """Scores of a layer's attention on one rank."""
        return self.tokens * self.sequence * self.model.heads / self.tensor

    @property
    def is_flexible(self) -> bool:
        """Whether the flexible dispatcher moves tokens to experts. If no dispatcher is given, it does so for
        experts that span nodes, as in published recipes.
        """
        return self.dispatcher == "flex" or (not self.dispatcher and self.expert * self.expert_tensor > NODE)

    @property
    def output_tokens(self) -> int:
        """Tokens of a microbatch in a rank's output layer; each multi-token prediction head adds as many again."""
        return self.tokens * (1 + len(self.model.mtp_heads))

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer states per parameter: moments and, for a 16-bit parameter, the optimizer's copy of it."""
        return self.kept_states or (12 if self.element_bytes < 4 else 8)

    @property
    def widens_gradients(self) -> bool:
        """Whether the optimizer step first converts gradients to fp32."""
        return not self.wide_gradients and self.element_bytes < 4 and not self.takes_gradients

    @property
    def gpus_per_stage(self) -> int:
        """Number of ranks that share a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def expert_replicas(self) -> int:
        """Number of ranks of a stage that hold the same experts."""
        return self.gpus_per_stage // (self.expert * self.expert_tensor)

    @property
    def gpus(self) -> int:
        """Number of ranks in the job."""
        return self.gpus_per_stage * self.pipeline

    @property
    def shard_rows(self) -> int:
        """Rows of a full shard in an even split over all pipeline and tensor ranks; the last shards may be smaller."""
        shards = self.pipeline * self.tensor
        return -(-self.model.vocab // shards) if self.exact_shards else rows_per_shard(self.model.vocab, shards)

    @property
    def shard_imbalance(self) -> float:
        """The fraction by which a full shard is larger than the average shard."""
        return self.shard_rows * self.pipeline * self.tensor / self.model.vocab - 1

    @property
    def whole_rows(self) -> int:
        """Vocabulary rows of a rank if each vocabulary layer is on one stage, split only over tensor ranks."""
        return -(-self.model.vocab // self.tensor)


@dataclass(frozen=True)
class Plan:
    """The plan for a job's pipeline: its schedule, vocabulary method, layers and vocabulary rows.

    layers: transformer layers (letters of a hybrid pattern) of each virtual stage; None: equally many.
    vocab_rows: vocabulary rows of each pipeline rank, summed over its tensor ranks; None: even shards.
    """

    schedule: str = DEFAULT_SCHEDULE
    vocab: VocabMethod = VocabMethod.NONE
    chunks: int | None = None
    layers: tuple[int, ...] | None = None
    vocab_rows: tuple[int, ...] | None = None
    shape: str = ""
    """The building block with which a flexible schedule meets its memory limit, such as `slack=12,gap=2`."""
    activation_limit: str = ""
    """The memory limit of a flexible schedule, as given to `--activation-limit`."""
    offload_chunks: int = 0
    """Number of chunks per rank whose activations are kept in host memory between forward and backward."""

    @property
    def method(self) -> str:
        """The vocabulary method. Without one: `redistributed` if the stages' numbers of layers differ by more than 1,
        otherwise `plain`.
        """
        if self.vocab is not VocabMethod.NONE:
            return str(self.vocab)
        return "redistributed" if self.layers and max(self.layers) - min(self.layers) > 1 else "plain"

    @property
    def in_megatron(self) -> bool:
        """Whether Megatron itself supports the plan."""
        return self.vocab is VocabMethod.NONE and family(self.schedule).in_megatron and not self.offload_chunks

    @property
    def has_pairs(self) -> bool:
        """Whether forwards and backwards can run as one."""
        return not self.offload_chunks and family(self.schedule).has_pairs

    def runs_pairs(self, job: Job) -> bool:
        """Whether forwards and backwards of `job` run as one."""
        return job.overlaps_experts and job.pipeline > 1 and self.has_pairs

    @property
    def title(self) -> str:
        """The method, and whether the vocabulary shards are balanced."""
        return self.method + (", balanced" if self.vocab_rows else "")

    @property
    def name(self) -> str:
        """The plan's name in sentences."""
        return f"{self.label}, {self.title}" + (" shards" if self.vocab_rows else "")

    @property
    def label(self) -> str:
        """The schedule's name in tables, with its memory limit and number of offloaded chunks if these are set."""
        away = f", {self.offload_chunks} offloaded" if self.offload_chunks else ""
        return f"{self.schedule} {self.activation_limit}".strip() + away

    def request(
        self, job: Job, microbatches: int | None = None, costs: Costs | None = None, further_orders: bool = True
    ) -> ScheduleRequest:
        """The schedule request of this plan for `job`. Raises UserError if the plan has no schedule for the job."""
        holders = None if self.vocab_rows is None else [rank for rank, rows in enumerate(self.vocab_rows) if rows]
        record = family(self.schedule)
        return ScheduleRequest.of(
            shaped(record, self.shape) if self.shape else record,
            job.pipeline,
            job.microbatches if microbatches is None else microbatches,
            method=self.vocab,
            chunks=self.chunks,
            costs=costs,
            vocab_ranks=holders,
            further_orders=further_orders,
            offload_chunks=self.offload_chunks,
            overlapped=self.runs_pairs(job),
        )

    def check(self, job: Job) -> None:
        """Raise UserError if training would refuse this plan for `job`."""
        if job.model.tied and self.vocab is VocabMethod.NONE and not family(self.schedule).ends_on_last_rank:
            raise UserError(
                "the first rank would hold the tied weight twice, in its first and its last chunk; add "
                "--vocab-parallel or --untie-embeddings-and-output-weights"
            )
        if self.offload_chunks and job.recompute is Recompute.FULL:
            raise UserError(
                f"--offload-chunks {self.offload_chunks} cannot be combined with --recompute-granularity full, which "
                "leaves almost nothing to copy: leave out one of the two"
            )
        self.shard_rows(job)

    def shard_rows(self, job: Job) -> tuple[int, ...]:
        """For each pipeline rank, the number of vocabulary rows per tensor rank, as the cost model counts them.

        If the plan assigns no rows, all ranks count as having full shards, although the last ranks may have fewer rows.
        Raises UserError if assigned rows do not fit the job, or if the method does not support assigned rows.
        """
        if self.vocab_rows is None:
            return (job.shard_rows,) * job.pipeline
        check_stage_rows(self.vocab_rows, job.model.vocab, job.pipeline, job.tensor)
        if not self.vocab.is_sharded:
            raise UserError(
                f"vocab_rows cannot be used with the vocab method {self.vocab}: use vocab-1 or vocab-2, or leave "
                "vocab_rows out"
            )
        return tuple(rows // job.tensor for rows in self.vocab_rows)

    def rows_by_rank(self, job: Job) -> tuple[int, ...] | None:
        """Vocabulary rows of each pipeline rank, summed over its tensor ranks; None without vocabulary parallelism."""
        if self.vocab is VocabMethod.NONE:
            return None
        if self.vocab_rows is not None:
            return self.vocab_rows
        vocab, rows = job.model.vocab, job.shard_rows * job.tensor
        return tuple(max(0, min(rows, vocab - rank * rows)) for rank in range(job.pipeline))
