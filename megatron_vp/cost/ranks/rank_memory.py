"""The memory of every rank: a constant part, and a part that varies with the schedule's order of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.fp8 import activations_saved, quantised, weight_copies
from megatron_vp.cost.layers.layer_operations import expert_weights, layer_weights, orthogonal_flops
from megatron_vp.cost.layers.layer_types import Counts, model_layers, stage_layers
from megatron_vp.cost.layers.shapes import Job, Recompute
from megatron_vp.cost.ranks.layer_memory import (
    SPLIT_BACKWARD,
    LayerMemory,
    PassMemory,
    layer_memory,
    pass_memory,
    small_activations,
)
from megatron_vp.cost.ranks.outside import FRAGMENTS, GIB, outside_memory
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import Held, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.ledger import changes, levels, lives

EMBEDDED = 2.7
"""Bytes per token and hidden unit that the paper's first stage keeps for embedding rows and a dropout mask."""

SHARED_BUFFERS = 11
"""Bytes per token and hidden unit for the copies of X (the output layer's input) and of X's gradient that S, T and
their collectives use.
"""

SCORES, OWN_SCORES = 6, 2
"""Bytes per logit of a split output layer. The paper's code keeps fp32 logits for the loss and 16-bit logits for the
matrix product. This project's code keeps 16-bit values from S to T: S replaces the logits by their exponentials in
place.
"""

WORKSPACES = 0.1 * GIB
"""Bytes of small tensors and of cuBLAS workspaces."""


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank in bytes, by purpose. PyTorch's allocator counts neither `outside` nor `fragments`."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    vocabulary: float
    communication: float
    outside: float
    fragments: float

    @property
    def allocated(self) -> float:
        """The peak that PyTorch's allocator reports."""
        return self.total - self.outside - self.fragments

    @property
    def total(self) -> float:
        """Bytes of device memory that the rank needs."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Bytes of each part, by name. All memory that PyTorch's allocator does not count is one part."""
        held = asdict(self)
        return held | {"outside": self.outside + held.pop("fragments")}


@lru_cache(maxsize=4096)
def _on_hardware(job: Job, hardware: Hardware, split: bool, kind: str) -> LayerMemory:
    """All figures of a layer, of which those of an fp8 recipe depend on the hardware."""
    memory, (dense, experts) = layer_memory(job, split, kind), orthogonal_flops(job, kind)
    saved = activations_saved(job, hardware, kind) if job.recompute is not Recompute.FULL else 0.0
    return replace(
        memory,
        kept=memory.kept - saved,
        waiting=memory.waiting - saved,
        small=small_activations(job, kind),
        weights=layer_weights(job, kind),
        experts=expert_weights(job, kind),
        copies=weight_copies(job, hardware, kind),
        dense_flops=dense,
        expert_flops=experts,
    )


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of every rank of `job` with `schedule` on `hardware`.

    layers: number of layers of each virtual stage, as in `Plan`.
    shard_rows: for each pipeline rank, the number of rows on each of its tensor ranks, as in `Plan.shard_rows`; None if
    the split is even.
    """

    job: Job
    schedule: Schedule
    layers: tuple[int, ...]
    hardware: Hardware
    shard_rows: tuple[int, ...] | None = None

    @cached_property
    def _layer_memory(self) -> dict[str, LayerMemory]:
        split = self.schedule.split_backward
        return {kind: _on_hardware(self.job, self.hardware, split, kind) for kind in model_layers(self.job)}

    @cached_property
    def _stages(self) -> tuple[Counts, ...]:
        return stage_layers(self.job, self.layers)

    def _sum(self, stages: Sequence[int], what: str) -> float:
        """The sum of a field of `LayerMemory` over the layers of virtual stages."""
        each = self._layer_memory
        return sum(count * getattr(each[kind], what) for stage in stages for kind, count in self._stages[stage].items())

    def _on(self, rank: int, what: str) -> float:
        """The same sum over all layers of a rank."""
        return self._sum(self.schedule.placement.stage_of[rank], what)

    def _rows(self, rank: int) -> int:
        return self.job.shard_rows if self.shard_rows is None else self.shard_rows[rank]

    def parameters(self, rank: int) -> int:
        """Number of parameters on a rank, in its layers and in its rows of the vocabulary layers."""
        job, placement = self.job, self.schedule.placement
        held = int(self._on(rank, "weights"))
        hidden = job.model.hidden
        if self.schedule.vocab is not VocabMethod.NONE:
            return held + (1 if job.model.tied else 2) * self._rows(rank) * hidden
        # The ranks of the first and the last stage each hold a copy of tied weights. Without vocabulary parallelism, a
        # tied model never has both stages on one rank.
        ends = placement.first_rank, placement.last_rank
        copies = ends.count(rank)
        if job.model.mtp_heads and rank == placement.rank_of(placement.stages - 1 - job.model.behind_mtp):
            # Multi-token prediction embeds tokens on its own stage.
            copies += rank not in (ends if job.model.tied else ends[:1])
        return held + copies * job.whole_rows * hidden

    def fp8_parameters(self, rank: int) -> float:
        """Number of parameters on a rank that are kept only in fp8."""
        if not self.job.fp8_parameters or self.job.fp8 is None:
            return 0.0
        return self._on(rank, "copies") / quantised(self.job.fp8, self.hardware).kept

    def expert_parameters(self, rank: int) -> int:
        """Parameters on a rank that belong to experts; each expert is on only some of the replicas."""
        return int(self._on(rank, "experts"))

    def stepped_parameters(self, rank: int) -> float:
        """Parameters that a rank's optimizer updates; a distributed optimizer divides them among the replicas."""
        return self._own_share(self.parameters(rank), self.expert_parameters(rank))

    def _own_share(self, everything: float, experts: float) -> float:
        """The part of a rank's figure for `everything`, and for `experts` alone, that its own optimizer step has."""
        job = self.job
        if not job.distributed_optimizer:
            return everything
        return (everything - experts) / (job.data * job.context) + experts / job.expert_replicas

    def muon(self, rank: int) -> tuple[float, float]:
        """Parameters of a rank's layers that its Muon optimizer updates, which have one state less than Adam's, and the
        FLOPs of its Newton-Schulz steps.
        """
        if not self.job.muon:
            return 0.0, 0.0
        experts = self._on(rank, "expert_flops")
        flops = self._own_share(self._on(rank, "dense_flops") + experts, experts)
        return self._own_share(self._on(rank, "weights"), self._on(rank, "experts")), flops

    def rank(self, rank: int) -> RankMemory:
        """A rank's peak memory. It occurs in a pass, or in an optimizer step that copies 16-bit gradients to fp32."""
        job, parameters, stepped = self.job, self.parameters(rank), self.stepped_parameters(rank)
        gradient = 4 if job.wide_gradients else job.element_bytes
        widened = 4 * stepped if job.widens_gradients else 0
        activations, vocabulary = self._peak_of_passes(rank)
        in_step = widened > activations + vocabulary
        # Microbatches whose hidden states are in transit to or from a rank: two with one chunk, four with more.
        messages = 2 * min(len(self.schedule.placement.stage_of[rank]), 2)
        counted = {
            "parameters": job.element_bytes * (parameters - self.fp8_parameters(rank)) + self._on(rank, "copies"),
            "gradients": gradient * parameters + in_step * widened,
            "optimizer": job.state_bytes * stepped - 4 * self.muon(rank)[0],
            "activations": WORKSPACES + (0.0 if in_step else activations),
            "vocabulary": 0.0 if in_step else vocabulary,
            "communication": messages * job.units * job.element_bytes,
        }
        moving = in_step * widened + counted["activations"] + counted["vocabulary"] + counted["communication"]
        outside = outside_memory(job, self.schedule, rank, self.hardware)
        return RankMemory(**counted, outside=outside, fragments=FRAGMENTS * moving)

    def _peak_of_passes(self, rank: int) -> tuple[float, float]:
        """Bytes of activations and of the vocabulary layers in the pass in which their sum is largest."""
        job, placement, split = self.job, self.schedule.placement, self.schedule.split_backward
        whole, paper, in_pass = (
            self.schedule.vocab is VocabMethod.NONE,
            job.layers is LayerKind.PAPER,
            self.in_pass(rank),
        )
        logits, scored = (tokens * job.whole_rows for tokens in (job.tokens, job.output_tokens))
        dense = job.element_bytes * job.whole_rows * job.model.hidden
        # An unsplit output layer keeps its logits from F to B (`scored`: also those of multi-token prediction), and
        # needs two more bytes per logit of one prediction while it runs.
        kept_score = 2 if job.cross_entropy == "te" else 4
        kept = self.kept(rank)
        waiting = kept
        if not paper:
            waiting = self.held(rank, "waiting")
            if whole and placement.last_rank == rank:
                # The output layer keeps the last norm's result until its weight gradient is computed.
                waiting[placement.stages - 1] += job.element_bytes * job.units
        kinds = {kind for stage in placement.stage_of[rank] for kind in self._stages[stage]}
        held = max((self._layer_memory[kind].once for kind in kinds), default=0.0)
        scores = 0.0
        peak = (0.0, 0.0)
        order, stages, last = self.schedule.ranks[rank], placement.stage_of[rank], placement.stages - 1
        moved = self.offloaded(rank) if self.schedule.offloaded else {}
        own: dict[tuple[int, int], float] = {}  # Bytes that are held now, by microbatch and chunk.
        activations = changes(order, Held.ACTIVATIONS)
        for (kind, microbatch, chunk), (taken, given), shared in zip(
            order, activations, self.shared(rank), strict=True
        ):
            stage, account = stages[chunk], (microbatch, chunk)
            has_output = whole and stage == last
            left = split and kind is not PassKind.BW  # A later W computes the weight gradient.
            if taken:
                held += kept[stage] - own.get(account, 0.0)
                own[account] = kept[stage]
            after = held
            if given and kind is PassKind.O:
                after -= moved[stage]
                own[account] -= moved[stage]
            elif given:
                after -= own.pop(account)
            elif left and kind is PassKind.B:
                # Layer by layer, the tensors that wait for W replace the tensors that were kept for B.
                after -= own[account] - waiting[stage]
                own[account] = waiting[stage]
            layers, vocabulary = held, scores + shared  # Bytes during the pass.
            moments = []  # The same at its other moments.
            if kind is PassKind.F:
                layers += in_pass[stage].forward
                if has_output:
                    scores += kept_score * scored
                    moments.append((held, scores + shared + 2 * logits))
            elif kind is PassKind.B or kind is PassKind.BW:
                layers += in_pass[stage].backward + (max(0.0, waiting[stage] - kept[stage]) if left else 0.0)
                if has_output:
                    vocabulary += 2 * logits
                    if not paper:
                        moments.append((held, vocabulary))
                        # The logits are freed before the layers' backward begins.
                        vocabulary += 2 * left * scored - 2 * logits - kept_score * scored
                    # A later W needs the logits' gradient in 16 bits.
                    scores -= (kept_score - 2 * left) * scored
                if whole and stage == 0:
                    # The first stage's backward computes the embedding's dense gradient last. In the paper's code, only
                    # one of the stage's layers still keeps tensors for W at that point.
                    fewer = waiting[stage] - SPLIT_BACKWARD * job.units if left and paper else 0.0
                    moments.append((after - fewer, scores + dense))
            elif kind is PassKind.W and has_output:
                vocabulary += dense
                scores -= 2 * scored
            held = after
            peak = max(peak, (layers, vocabulary), *moments, key=sum)
        return peak

    def shared(self, rank: int) -> list[float]:
        """Bytes that a rank needs for split vocabulary layers during each pass of its order."""
        placement, order, rows = self.schedule.placement, self.schedule.ranks[rank], self._rows(rank)
        if self.schedule.vocab is VocabMethod.NONE or not (rows or rank in (placement.first_rank, placement.last_rank)):
            return [0.0] * len(order)
        if self.job.layers is LayerKind.PAPER:
            scores = [SCORES] * len(order)
        else:
            # A pass V runs both S and T of a microbatch, so the logits of this microbatch exist only during V.
            held = zip(order, levels(order, Held.LOGITS), strict=True)
            scores = [OWN_SCORES * (during + (step.kind is PassKind.V)) for step, (during, _) in held]
        predictions = self.job.output_tokens / self.job.tokens
        buffers, score = SHARED_BUFFERS * self.job.units * predictions, self.job.output_tokens * rows
        return [buffers + each * score for each in scores]

    def kept(self, rank: int) -> dict[int, float]:
        """Bytes that a microbatch keeps from F to B on each virtual stage of `rank`, not counting logits."""
        placement = self.schedule.placement
        kept = self.held(rank, "kept")
        whole = self.schedule.vocab is VocabMethod.NONE
        if whole and placement.last_rank == rank and self.job.layers is not LayerKind.PAPER:
            # The last norm keeps its input, and the output layer keeps the norm's result.
            kept[placement.stages - 1] += 2 * self.job.element_bytes * self.job.units
        return kept

    def offloaded(self, rank: int) -> dict[int, float]:
        """Bytes of activations that leave the device when a stage is offloaded.

        Small tensors stay on the device (see `small_activations`). Logits of an unsplit output layer also stay, because
        the backward of the last stage follows at once.
        """
        return {stage: max(0.0, kept - self._sum([stage], "small")) for stage, kept in self.kept(rank).items()}

    def host(self, rank: int) -> float:
        """Host memory of a rank's offloaded activations in bytes.

        Each chunk has its own buffers, enough for the largest number of microbatches whose activations are on the host
        at once.
        """
        order, moved = self.schedule.ranks[rank], self.offloaded(rank)
        spans: dict[int, list[tuple[int, int]]] = {}
        for first, last in lives(order, Held.HOST_ACTIVATIONS):
            spans.setdefault(order[first].chunk, []).append((first, last))
        stages = self.schedule.placement.stage_of[rank]
        return sum(_most_at_once(each) * moved[stages[chunk]] for chunk, each in spans.items())

    def in_pass(self, rank: int) -> dict[int, PassMemory]:
        """Temporary bytes in the passes of every virtual stage of `rank`, in addition to what layers keep."""
        ends, pattern = [0, *accumulate(self.layers)], self.job.model.pattern
        return {
            stage: pass_memory(self.job, self.schedule.split_backward, pattern[ends[stage] : ends[stage + 1]])
            for stage in self.schedule.placement.stage_of[rank]
        }

    def held(self, rank: int, what: str) -> dict[int, float]:
        """Bytes that a microbatch needs on each virtual stage of `rank`. `what` is a field of `LayerMemory`."""
        job, held = self.job, {stage: self._sum([stage], what) for stage in self.schedule.placement.stage_of[rank]}
        if 0 in held and self.schedule.vocab is not VocabMethod.NONE:
            # In addition to what its layers keep, stage 0 keeps a dropout mask and, in the paper's code, embedding
            # rows. In this project, the embedding rows are counted as the first layer's input.
            held[0] += (EMBEDDED if job.layers is LayerKind.PAPER else job.model.dropout) * self.job.units
        return held


def _most_at_once(spans: Sequence[tuple[int, int]]) -> int:
    """Largest number of `spans` that overlap at any position; each span includes both of its ends."""
    ends = [(first, 1) for first, _ in spans] + [(last + 1, -1) for _, last in spans]
    return max(accumulate(change for _, change in sorted(ends)))
