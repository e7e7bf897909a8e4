"""Computes the time of each pass on one rank from the FLOPs and the memory traffic of its operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.flops import Matrix, attention_matrices, layer_matrices
from megatron_vp.cost.sizes.fp8 import fp8_matrices, quantised
from megatron_vp.cost.sizes.layer_types import LayerType, MlpRecompute, mlp_of, mlp_recompute
from megatron_vp.cost.sizes.shapes import CrossEntropy, Job, Recompute
from megatron_vp.cost.times.attention_times import attention_times
from megatron_vp.cost.times.communication import CommunicationModel
from megatron_vp.cost.times.expert_times import LAUNCHES, PRODUCT, copies, separate_activation
from megatron_vp.cost.times.vocab_kernels import ShardPasses
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import VocabMethod

EAGER_SCORES_FORWARD, EAGER_SCORES_BACKWARD = 38, 14
"""Bytes per logit that Megatron's unfused cross entropy reads and writes. The forward moves 6 bytes to convert to fp32,
4 for the maximum, 8 to subtract, 8 to exponentiate, 4 to sum and 8 to divide. The backward moves 8 bytes to scale and 6
to convert to 16 bits.
"""

WHOLE_SCORES = {
    CrossEntropy.EAGER: (EAGER_SCORES_FORWARD, EAGER_SCORES_BACKWARD),
    CrossEntropy.NATIVE: (22, 10),
    CrossEntropy.TE: (6, 4),
}
"""Bytes per logit that each cross-entropy implementation moves in the forward and in the backward. The forward of
NATIVE moves 6 bytes to convert to fp32 and find the maximum, 8 to exponentiate and sum, and 8 to divide; its backward
moves 10 bytes to scale and convert to 16 bits. TE leaves the logits in 16 bits. Its forward moves 2 bytes to find the
softmax's maximum and sum, and 4 to replace the logit by its gradient. Its backward moves 4 bytes to scale the gradient.
"""

EMBED_FORWARD, EMBED_BACKWARD = 115, 55
"""Bytes that IF and IB move per hidden unit of a token, derived from their published times."""

SHARD_EMBEDDING_GRADIENT, WHOLE_EMBEDDING_GRADIENT = 8, 2
"""Bytes moved per element of an embedding's dense gradient. The gradient of a shard is filled with zeros and then added
to the accumulated gradient, as published times of IB imply. The gradient of a whole embedding is only filled with
zeros, as the published V-Half baselines imply.
"""

FUSED_HIDDEN = 22
"""Bytes that a fused layer's forward moves per hidden unit of a token. Each of the layer's two blocks moves 4 bytes for
a norm, and 7 bytes to add the residual and copy the sum. Dropout masks are counted separately.
"""

OWN_SHARE = 0.4
"""Norms, dropouts and residuals move this fraction of the bytes that the paper's layers move outside matrix products.
"""

SHARED_HIDDEN = 50
"""Bytes that S and T move per hidden unit of a token. Together, they read and write the output layer's input and its
gradient several times, in fp32 and in 16 bits.
"""

EARLY_HIDDEN, EARLY_SCORES = 26, 8
"""Additional bytes that vocab-2 moves because it computes the input gradient before the scale factor is known: per
hidden unit of a token, and per logit.
"""


class Split(NamedTuple):
    """Seconds of a forward, an input gradient and a weight gradient."""

    F: float
    B: float
    W: float


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one microbatch's work on one rank of `job`, at the sustained speed of `hardware`."""

    job: Job
    hardware: Hardware

    def compute(self, flops: float, share: float) -> float:
        """Seconds that `flops` operations take at the fraction `share` of the hardware's peak rate."""
        return flops / (self.hardware.peak_flops * share)

    def memory_time(self, count: float) -> float:
        """Seconds to read and write memory, `count` bytes in total."""
        return count / (self.hardware.memory_bandwidth * self.hardware.constants.bandwidth)

    def gemm_time(self, matrix: Matrix) -> float:
        """Seconds of one matrix product: the longer of its arithmetic and its memory traffic."""
        operands = matrix.tokens * (matrix.inputs + matrix.outputs) * matrix.copies + matrix.weights
        rates = self.hardware.rates
        arithmetic = matrix.flops / rates.gemm if rates else self.compute(matrix.flops, self.hardware.constants.matrix)
        arithmetic += PRODUCT * matrix.copies if rates and matrix.copies > 1 else 0.0
        return max(arithmetic, self.memory_time(self.job.element_bytes * operands))

    def fp8_gemm_time(self, matrix: Matrix) -> float:
        """Seconds of the same product as in `gemm_time`, but with fp8 operands and a result in 16 bits."""
        operands = matrix.tokens * (matrix.inputs + 2 * matrix.outputs) * matrix.copies + matrix.weights
        assert self.hardware.rates is not None  # see `refuse_fp8`
        arithmetic = matrix.flops / self.hardware.rates.fp8_gemm
        arithmetic += PRODUCT * matrix.copies if matrix.copies > 1 else 0.0
        return max(arithmetic, self.memory_time(operands))

    def layer(self, kind: LayerType = LayerType.WHOLE) -> Split:
        """Seconds of one layer, with matrix products in the job's precision."""
        plain, job = self.plain_layer(kind), self.job
        if job.fp8 is None:
            return plain
        cast = quantised(job.fp8, self.hardware)
        faster = inputs = outputs = weights = 0.0
        matrices = fp8_matrices(job, kind)
        for matrix in matrices:
            faster += self.gemm_time(matrix) - self.fp8_gemm_time(matrix)
            inputs += matrix.tokens * matrix.inputs * matrix.copies
            outputs += matrix.tokens * matrix.outputs * matrix.copies
            weights += matrix.weights
        # A weight is quantised only in the first microbatch of an iteration.
        forward = self.memory_time(cast.moved * (inputs + weights / job.microbatches)) - faster
        again = forward if job.recompute is Recompute.FULL else 0.0
        if mlp_recompute(job, kind) is MlpRecompute.ALL:
            for matrix in matrices[-2:]:
                again += self.memory_time(cast.moved * matrix.tokens * matrix.inputs * matrix.copies)
                again += self.fp8_gemm_time(matrix) - self.gemm_time(matrix)
        backward = self.memory_time(cast.moved * outputs) - faster
        return Split(plain.F + forward, plain.B + backward + again, plain.W - faster)

    def plain_layer(self, kind: LayerType = LayerType.WHOLE) -> Split:
        """Seconds of one layer without fp8."""
        job = self.job
        matrices = layer_matrices(job, kind)
        products = sum(map(self.gemm_time, matrices))
        elementwise = self.memory_time(self.layer_bytes(kind))
        attention, twice = attention_times(job, self.hardware, kind)
        separate = separate_activation(job, kind)
        communication = CommunicationModel(job, self.hardware)
        # The backward sends keys and values again, and also their gradients.
        keys = communication.exposed_keys(attention, kind), 2 * communication.exposed_keys(twice / 2, kind)
        mlp = mlp_of(job.model, kind)
        launches = LAUNCHES if self.counted and mlp and mlp.experts else 0.0
        forward = products + attention + elementwise + keys[0] + launches + self.memory_time(separate.forward)
        backward = products + twice + 2 * elementwise + keys[1] + 2 * launches + self.memory_time(separate.backward)
        weight = products + self.memory_time(self.accumulated * sum(matrix.weights for matrix in matrices))
        # Recomputation repeats the communication of hidden states.
        if job.recompute is Recompute.FULL:
            again = forward + communication.layer_traffic(kind)
        else:
            again = self._mlps_again(kind, launches + communication.mlp_traffic(kind))
        return Split(forward, backward + again, weight)

    def _mlps_again(self, kind: LayerType, others: float) -> float:
        """Seconds to recompute a layer's MLPs in the backward; `others`: seconds of launches and communication."""
        job, model, t = self.job, self.job.model, self.job.tensor
        again, mlp = mlp_recompute(job, kind), mlp_of(model, kind)
        if again is MlpRecompute.NONE or mlp is None:
            return 0.0
        moved = (3 if model.gated else 2) * mlp.per_token * mlp.width / t
        if again is MlpRecompute.ACTIVATION:
            return self.memory_time(job.element_bytes * job.tokens * moved)
        moved += (3 if model.gated else 2) * mlp.shared / t
        moved += copies(job, kind, self.hardware) * mlp.per_token * model.hidden / t
        products = layer_matrices(job, kind)[len(attention_matrices(job)) if kind.attends else 0 :]
        return sum(map(self.gemm_time, products)) + self.memory_time(job.element_bytes * job.tokens * moved) + others

    @property
    def counted(self) -> bool:
        """Whether the job runs Transformer Engine's layers on hardware with known attention rates."""
        rates = self.hardware.rates
        return rates is not None and rates.attention is not None and self.job.layers is LayerKind.ENGINE

    @property
    def fused_local(self) -> bool:
        """Whether the job runs Megatron's local layers on a GPU; on CPU cores, all layers are modelled alike."""
        return self.job.layers in (LayerKind.LOCAL, LayerKind.LOCAL_SDPA) and self.hardware.is_gpu

    @property
    def accumulated(self) -> int:
        """Bytes moved per element to add a weight gradient to the accumulated gradient, which is read and written."""
        return 8 if self.job.wide_gradients else 2 * self.job.element_bytes

    @property
    def gap(self) -> float:
        """Constant time in seconds that every pass takes for kernel launches and the transition to the next pass."""
        rates = self.hardware.rates
        return rates.gap if rates and rates.gap else self.hardware.constants.gap

    def layer_bytes(self, kind: LayerType) -> float:
        """Bytes that a layer's forward moves outside its matrix products; the backward moves twice as many.

        If `counted` or `fused_local` is true, the bytes of the layer's operations are added up. Otherwise, the result
        is proportional to a fitted constant.
        """
        job, model, t = self.job, self.job.model, self.job.tensor
        units = job.tokens * model.hidden / (t if job.sequence_parallel else 1)
        if not (self.counted or self.fused_local):
            # Without sequence parallelism, only the work between a block's two matrix products is divided by t.
            inner = OWN_SHARE * units + (1 - OWN_SHARE) * job.tokens * model.hidden / t
            return kind.share * self.hardware.constants.layer_bytes * inner
        wide, mlp, inside = job.element_bytes, mlp_of(model, kind), 0.0
        if kind.attends:
            # Query and key norms, rotary embedding, and the split of the joint projection are each counted as one read
            # and one write of queries, keys and values.
            keys = max(model.keys // t, model.head_size) + max(model.values // t, model.value_size)
            inside += wide * (2 + 2 * model.rotary + 2 * model.query_key_norms) * (model.queries / t + keys)
        if mlp:
            inside += wide * (3 if model.gated else 2) * (mlp.per_token * mlp.width + mlp.shared) / t
            inside += copies(job, kind, self.hardware) * wide * mlp.per_token * model.hidden / t
        return kind.share * (FUSED_HIDDEN + 2 * model.dropout) * units + job.tokens * inside

    def whole_output(self) -> Split:
        """Seconds that the unsplit output layer and the loss take on the last stage."""
        matrix = Matrix(self.job.model.hidden, self.job.whole_rows, self.job.output_tokens)
        logits, product = matrix.tokens * matrix.outputs, self.gemm_time(matrix)
        forward, backward = WHOLE_SCORES[self.job.cross_entropy]
        return Split(
            product + self.memory_time(forward * logits),
            product + self.memory_time(backward * logits),
            product + self.memory_time(self.accumulated * matrix.weights),
        )

    def whole_embedding(self) -> Split:
        """Seconds of the first stage's input embedding if it is not split."""
        job = self.job
        units = job.tokens * job.model.hidden
        return Split(
            self.memory_time(2 * job.element_bytes * units),
            self.memory_time(WHOLE_EMBEDDING_GRADIENT * job.whole_rows * job.model.hidden),
            0.0,
        )

    def own_kernels(self, rows: int | None = None) -> ShardPasses | None:
        """The cost model of this project's vocabulary kernels on a shard of `rows` rows (None: an even shard).

        Returns None if the hardware's rates are unknown; callers then model the paper's code.
        """
        job, rates = self.job, self.hardware.rates
        if rates is None:
            return None
        rows = job.shard_rows if rows is None else rows
        gradient = 4 if job.wide_gradients else job.element_bytes
        return ShardPasses(rates, job.tokens, rows, job.model.hidden, job.element_bytes, gradient)

    def vocabulary_passes(self, method: VocabMethod, rows: int | None = None) -> tuple[float, float, float, float]:
        """Seconds of S, T, IF and IB, which are 0 on a rank without rows."""
        return (0.0, 0.0, 0.0, 0.0) if rows == 0 else (*self.output_shard(method, rows), *self.embedding_shard(rows))

    def output_shard(self, method: VocabMethod, rows: int | None = None) -> tuple[float, float]:
        """Seconds of S and T."""
        own = self.own_kernels(rows)
        if own:
            return replace(own, tokens=self.job.output_tokens).output(method)
        return self.eager_output_shard(method, rows)

    def eager_output_shard(self, method: VocabMethod, rows: int | None = None) -> tuple[float, float]:
        """Seconds of S and T in the paper's eager code, with the fitted constants."""
        job = self.job
        matrix = Matrix(job.model.hidden, job.shard_rows if rows is None else rows, job.output_tokens)
        product, logits = self.gemm_time(matrix), matrix.tokens * matrix.outputs
        early = method is VocabMethod.VOCAB_2
        hidden = (SHARED_HIDDEN + early * EARLY_HIDDEN) * job.output_tokens * job.model.hidden
        softmax = self.memory_time((self.hardware.constants.score_bytes + early * EARLY_SCORES) * logits + hidden)
        first = EAGER_SCORES_FORWARD / (EAGER_SCORES_FORWARD + EAGER_SCORES_BACKWARD)
        products = 2 if early else 1
        scores = products * product + first * softmax + self.hardware.constants.gap
        added = self.memory_time(self.accumulated * matrix.weights)
        gradients = (3 - products) * product + (1 - first) * softmax + added
        return scores, gradients + self.hardware.constants.gap

    def embedding_shard(self, rows: int | None = None) -> tuple[float, float]:
        """Seconds of IF and IB.

        An embedding row is exchanged only among the pipeline ranks with the same tensor rank as its owner.
        """
        job, own = self.job, self.own_kernels(rows)
        if own:
            return own.embedding(job.pipeline * job.tensor if rows is None else job.model.vocab / rows)
        units, weights = job.tokens * job.model.hidden / job.tensor, (rows or job.shard_rows) * job.model.hidden
        return (
            self.memory_time(EMBED_FORWARD * units) + self.hardware.constants.gap,
            self.memory_time(EMBED_BACKWARD * units + SHARD_EMBEDDING_GRADIENT * weights) + self.hardware.constants.gap,
        )

    def placed_rows(self) -> float:
        """Seconds that F and B of the first stage each take to reorder exchanged embedding rows. The result is 0 with
        the paper's kernels, whose IF and IB include this time.
        """
        own = self.own_kernels()
        return own.placed_rows() if own else 0.0

    def synchronous_embedding(self) -> tuple[float, float]:
        """Seconds that the embedding's forward and backward take in pass V (interlaced), without communication."""
        job = self.job
        return (
            self.memory_time(2 * job.element_bytes * job.tokens * job.model.hidden),
            self.memory_time(SHARD_EMBEDDING_GRADIENT * job.shard_rows * job.model.hidden),
        )

    def optimizer_step(self, parameters: float) -> float:
        """Seconds of mixed-precision Adam: gradient conversion to fp32, norms, and reads and writes of states."""
        spared = 2 * (12 - self.job.states.kept) if self.job.states else 0
        return self.memory_time((46 - spared) * parameters)
