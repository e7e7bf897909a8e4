"""Computes the time of each pass on one rank from the FLOPs and the memory traffic of its operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vp.cost.layers.fp8 import cast_bytes, element_bytes, fp8_weights, quantised, rate_of
from megatron_vp.cost.layers.layer_operations import Matrix, Op, operations
from megatron_vp.cost.layers.shapes import Fp8Recipe, Recompute
from megatron_vp.cost.ranks.communication import CommunicationModel
from megatron_vp.cost.ranks.vocab_kernels import ShardPasses
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import VocabMethod

EAGER_SCORES_FORWARD, EAGER_SCORES_BACKWARD = 38, 14
"""Bytes per logit that Megatron's unfused cross entropy reads and writes. The forward moves 6 bytes to convert to fp32,
4 for the maximum, 8 to subtract, 8 to exponentiate, 4 to sum and 8 to divide. The backward moves 8 bytes to scale and 6
to convert to 16 bits.
"""

WHOLE_SCORES = {
    "eager": (EAGER_SCORES_FORWARD, EAGER_SCORES_BACKWARD),
    "native": (22, 10),
    "te": (6, 4),
    "logits": (42, 26),
}
"""Bytes per logit that the loss of an unsplit output layer (see `Job`) moves in the forward and the backward. `native`
moves 6 bytes to convert to fp32 and find the maximum, 8 to exponentiate and sum, and 8 to divide; its backward
moves 10 bytes to scale and convert to 16 bits. `te` leaves the logits in 16 bits. Its forward moves 2 bytes to find the
softmax's maximum and sum, and 4 to replace the logit by its gradient. Its backward moves 4 bytes to scale the gradient.
`logits` moves 6 bytes to convert to fp32, 8 to divide by the temperature, 8 for the logarithm of the softmax, and 20
for the entropy; its backward moves 12 bytes through the softmax, 8 to divide and 6 to convert. No run confirms these.
"""

EMBED_FORWARD, EMBED_BACKWARD = 115, 55
"""Bytes that IF and IB move per hidden unit of a token, derived from their published times."""

SHARD_EMBEDDING_GRADIENT, WHOLE_EMBEDDING_GRADIENT = 8, 2
"""Bytes moved per element of an embedding's dense gradient. The gradient of a shard is filled with zeros and then added
to the accumulated gradient, as published times of IB imply. The gradient of a whole embedding is only filled with
zeros, as the published V-Half baselines imply.
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


BACKWARD = 2.5
"""FLOPs of a fused attention backward relative to the forward: five matrix products instead of two."""

HALF = 350
"""Keys per sequence at which fused kernels reach half of their peak rate. Published times on H100 imply 200 to 500."""

NARROW = 0.4
"""Kernels would lose this share of their rate at head width 0. The lost share falls linearly with the head width, to 0
at 128. Published rates for heads of width 64 are 0.77 to 0.84 of the rates for heads of width 128.
"""

TILE = 128
"""Number of keys in a tile, which a kernel always computes as a whole."""

SCORE_BYTES = 13
"""Bytes per score that the forward of unfused attention writes and reads: the results of the query-key product, the
softmax and the dropout.
"""


class Split(NamedTuple):
    """Seconds of a forward, an input gradient and a weight gradient."""

    F: float
    B: float
    W: float


@dataclass(frozen=True)
class PassTimes(CommunicationModel):
    """Seconds of one microbatch's work on one rank of `job`, at the sustained speed of `hardware`."""

    def memory_time(self, count: float) -> float:
        """Seconds to read and write memory, `count` bytes in total."""
        return count / (self.hardware.memory_bandwidth * self.hardware.constants.bandwidth)

    def gemm_time(self, matrix: Matrix, recipe: Fp8Recipe | None = None) -> float:
        """Seconds of one matrix product: the longer of its arithmetic and its memory traffic.

        recipe: how its operands are quantised to fp8 or fp4, if they are; the result is in 16 bits.
        """
        rates = self.hardware.rates
        rate, size = self.rate, float(self.job.element_bytes)
        result = size
        if recipe:
            rate, size, result = rate_of(recipe, self.hardware), element_bytes(recipe), 2.0  # see `refuse_fp8`
        moved = matrix.tokens * (size * matrix.inputs + result * matrix.outputs) * matrix.copies + size * matrix.weights
        started = rates.product * matrix.copies if rates and matrix.copies > 1 else 0.0
        return max(matrix.flops / rate + started, self.memory_time(moved))

    @property
    def rate(self) -> float:
        """FLOP/s of large matrix products in 16 bits."""
        rates = self.hardware.rates
        return rates.gemm if rates else self.hardware.peak_flops * self.hardware.constants.matrix

    def operation(self, op: Op) -> Split:
        """Seconds of one operation, with the communication that it waits for."""
        moved, wait = self.memory_time(op.moved) + op.work / self.rate, self.wait(op)
        back = 2 * moved if op.back is None else self.memory_time(op.back)
        product = added = 0.0
        if op.matrix:
            matrix, used = op.matrix, self.job.fp8 if op.narrows else None
            product, added = self.gemm_time(matrix, used), self.memory_time(self.accumulated * matrix.weights)
            if used:
                rows, columns = (self.memory_time(each) for each in cast_bytes(self.job, op, self.hardware))
                moved, back = moved + rows, back + columns
        if op.scores:
            once, twice = self.attention(op.scores)
            # The backward sends keys and values again, and also their gradients.
            moved, back = moved + once + self.exposed_keys(once), back + twice + 2 * self.exposed_keys(twice / 2)
        return Split(product + moved + wait, product + back + wait, product + added)

    def layers(self, stages: Sequence[Mapping[str, int]]) -> list[Split]:
        """Seconds of each stage's layers, given how many there are of each kind: of their kernels, or of the host,
        which launches them.
        """
        by_kind = {kind: (*self.kernels(kind), *self.launches(kind)) for kind in set[str]().union(*stages)}
        taken = []
        for counts in stages:
            F, B, W, forward, backward = (
                sum(count * by_kind[kind][place] for kind, count in counts.items()) for place in range(5)
            )
            taken.append(Split(max(F, forward), max(B, backward - W), W))
        return taken

    def layer(self, kind: str = "t") -> Split:
        """Seconds of a stage with one layer."""
        return self.layers([{kind: 1}])[0]

    def kernels(self, kind: str) -> Split:
        """Seconds of a layer's kernels, and of the communication that they wait for."""
        job, found = self.job, operations(self.job, kind)
        times = [(op, self.operation(op)) for op in found]
        forward, backward, weight = (sum(each[place] for _, each in times) for place in range(3))
        again = sum(each.F for op, each in times if op.again(job))
        fitted = self.memory_time(self.fitted_bytes(found))
        weights = 0.0
        if job.fp8:  # A weight is quantised only in the first microbatch of an iteration.
            each = quantised(job.fp8, self.hardware).moved / job.microbatches
            weights = self.memory_time(each * fp8_weights(job, kind))
        if job.recompute is Recompute.FULL:
            again += fitted + weights
        return Split(forward + fitted + weights, backward + 2 * fitted + again, weight)

    def launches(self, kind: str) -> tuple[float, float]:
        """Seconds in which the host launches the kernels of a layer's forward and of its whole backward. They are
        counted only with experts, whose kernels are small and many.
        """
        found = operations(self.job, kind)
        if not self.counted or self.job.graphs == "full_iteration" or all(op.name != "router" for op in found):
            return 0.0, 0.0
        once = self.hardware.rates.launches if self.hardware.rates else 0.0
        again = sum(op.again(self.job) for op in found) / len(found)
        return once, (2 + again) * once

    def fitted_bytes(self, found: Iterable[Op]) -> float:
        """Bytes that a layer's forward moves outside matrix products in addition to those of its operations.

        They are 0 with Transformer Engine's layers on hardware with known attention rates (`counted`), and with
        Megatron's local layers on a GPU. For other layers, a fitted constant replaces the bytes of the operations.
        """
        job = self.job
        local = job.layers in (LayerKind.LOCAL, LayerKind.LOCAL_SDPA) and self.hardware.is_gpu
        if self.counted or local:
            return 0.0
        # Without sequence parallelism, only the work between a block's two matrix products is divided by t.
        inner = OWN_SHARE * job.units + (1 - OWN_SHARE) * job.tokens * job.model.hidden / job.tensor
        each = 0.5 * self.hardware.constants.layer_bytes * inner
        return sum(each * (op.name == "residual") - op.moved for op in found if op.back is None)

    @property
    def counted(self) -> bool:
        """Whether the job runs Transformer Engine's layers on hardware with known attention rates."""
        rates = self.hardware.rates
        return self.job.layers is LayerKind.ENGINE and rates is not None and rates.attention is not None

    @property
    def accumulated(self) -> int:
        """Bytes moved per element to add a weight gradient to the accumulated gradient, which is read and written."""
        return 8 if self.job.wide_gradients else 2 * self.job.element_bytes

    @property
    def gap(self) -> float:
        """Constant time in seconds that every pass takes for kernel launches and the transition to the next pass."""
        return (self.hardware.rates and self.hardware.rates.gap) or self.hardware.constants.gap

    def whole_output(self) -> Split:
        """Seconds that the unsplit output layer and the loss take on the last stage."""
        job = self.job
        forward, backward = (each * job.output_tokens * job.whole_rows for each in WHOLE_SCORES[job.cross_entropy])
        matrix = Matrix(job.model.hidden, job.whole_rows, job.output_tokens)
        return self.operation(Op("output", matrix, moved=forward, back=backward, narrows=job.fp8_output))

    def whole_embedding(self) -> Split:
        """Seconds of the first stage's input embedding if it is not split."""
        job = self.job
        back = WHOLE_EMBEDDING_GRADIENT * job.whole_rows * job.model.hidden
        looked_up = 2 * job.element_bytes * job.tokens * job.model.hidden
        return self.operation(Op("embedding", moved=looked_up, back=back))

    def own_kernels(self, tokens: int, rows: int | None = None) -> ShardPasses | None:
        """The cost model of this project's vocabulary kernels on a shard of `rows` rows (None: an even shard).

        Returns None if the hardware's rates are unknown; callers then model the paper's code.
        """
        job, rates = self.job, self.hardware.rates
        gradient = 4 if job.wide_gradients else job.element_bytes
        rows = job.shard_rows if rows is None else rows
        if rates is None:
            return None
        return ShardPasses(rates, tokens, rows, job.model.hidden, job.element_bytes, gradient)

    def vocabulary_passes(self, method: VocabMethod, rows: int | None = None) -> tuple[float, float, float, float]:
        """Seconds of S, T, IF and IB, which are 0 on a rank without rows."""
        return (0.0, 0.0, 0.0, 0.0) if rows == 0 else (*self.output_shard(method, rows), *self.embedding_shard(rows))

    def output_shard(self, method: VocabMethod, rows: int | None = None) -> tuple[float, float]:
        """Seconds of S and T."""
        job, own = self.job, self.own_kernels(self.job.output_tokens, rows)
        if own:
            return own.output(method)
        # The paper's eager code, with the fitted constants.
        matrix = Matrix(job.model.hidden, job.shard_rows if rows is None else rows, job.output_tokens)
        product, logits = self.gemm_time(matrix), matrix.tokens * matrix.outputs
        early, constants = method is VocabMethod.VOCAB_2, self.hardware.constants
        hidden = (SHARED_HIDDEN + early * EARLY_HIDDEN) * job.output_tokens * job.model.hidden
        softmax = self.memory_time((constants.score_bytes + early * EARLY_SCORES) * logits + hidden)
        first = EAGER_SCORES_FORWARD / (EAGER_SCORES_FORWARD + EAGER_SCORES_BACKWARD)
        products = 2 if early else 1
        scores = products * product + first * softmax + constants.gap
        added = self.memory_time(self.accumulated * matrix.weights)
        gradients = (3 - products) * product + (1 - first) * softmax + added
        return scores, gradients + constants.gap

    def embedding_shard(self, rows: int | None = None) -> tuple[float, float]:
        """Seconds of IF and IB.

        An embedding row is exchanged only among the pipeline ranks with the same tensor rank as its owner.
        """
        job, own = self.job, self.own_kernels(self.job.tokens, rows)
        if own:
            return own.embedding(job.pipeline * job.tensor if rows is None else job.model.vocab / rows)
        units, weights = job.tokens * job.model.hidden / job.tensor, (rows or job.shard_rows) * job.model.hidden
        moved = EMBED_FORWARD * units, EMBED_BACKWARD * units + SHARD_EMBEDDING_GRADIENT * weights
        forward, backward = (self.memory_time(each) + self.hardware.constants.gap for each in moved)
        return forward, backward

    def placed_rows(self) -> float:
        """Seconds that F and B of the first stage each take to reorder exchanged embedding rows. The result is 0 with
        the paper's kernels, whose IF and IB include this time.
        """
        own = self.own_kernels(self.job.tokens)
        return own.placed_rows() if own else 0.0

    def synchronous_embedding(self) -> tuple[float, float]:
        """Seconds that the embedding's forward and backward take in pass V (interlaced), without communication."""
        job = self.job
        return (
            self.memory_time(2 * job.element_bytes * job.tokens * job.model.hidden),
            self.memory_time(SHARD_EMBEDDING_GRADIENT * job.shard_rows * job.model.hidden),
        )

    def optimizer_step(self, parameters: float, muon: float = 0.0, flops: float = 0.0) -> float:
        """Seconds of mixed-precision Adam: gradient conversion to fp32, norms, and reads and writes of states.

        muon: number of parameters that Muon updates, with one state less; flops: FLOPs of its Newton-Schulz steps.
        """
        spared = 2 * (12 - self.job.kept_states) if self.job.kept_states else 0
        return self.memory_time((46 - spared) * parameters - 8 * muon) + flops / self.rate

    def attention(self, flops: float) -> tuple[float, float]:
        """Seconds of one layer's attention on one rank, in F and in B, without the projections before and after it.

        flops: its FLOPs, not halved for causality.
        """
        job, causal, rates, constants = self.job, flops / 2, self.hardware.rates, self.hardware.constants
        if job.layers is LayerKind.LOCAL and self.hardware.is_gpu:
            # Unfused attention also computes, writes and reads the scores above the diagonal.
            forward = 2 * causal / (self.hardware.peak_flops * constants.matrix)
            forward += self.memory_time(SCORE_BYTES * job.scores)
            return forward, 2 * forward
        reached: Iterable[float] = constants.attention_forward, constants.attention_backward
        if self.counted and rates and rates.attention:
            share, older = job.flash_attention_2, rates.flash_attention_2 or rates.attention
            reached = (1 / ((1 - share) / new + share / old) for new, old in zip(rates.attention, older, strict=True))
            keys, narrow = job.sequence / job.context, max(0.0, 1 - job.model.head_size / 128)
            # Sliding-window layers skip all but the last `window` tokens.
            inside = min(1.0, (job.model.window + TILE) / (job.sequence / 2))
            causal *= (1 - job.model.windowed * (1 - inside)) * (1 + HALF / keys) / (1 - NARROW * narrow)
        forward, backward = (causal / (self.hardware.peak_flops * each) for each in reached)
        return forward, BACKWARD * backward
