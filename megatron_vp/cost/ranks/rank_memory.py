"""The memory of every rank: a constant part, and a part that varies with the schedule's order of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.fp8 import quantised
from megatron_vp.cost.layers.layer_types import stage_kinds
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.cost.ranks.layer_memory import SPLIT_BACKWARD, LayerMemory, stage_memory
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
    def stages(self) -> list[LayerMemory]:
        """The memory of every virtual stage, without logits."""
        job, split, paper = self.job, self.schedule.split_backward, self.job.layers is LayerKind.PAPER
        found = [stage_memory(job, self.hardware, split, kinds) for kinds in stage_kinds(job, self.layers)]
        if self.schedule.vocab is not VocabMethod.NONE:
            # In addition to what its layers keep, stage 0 keeps a dropout mask and, in the paper's code, embedding
            # rows. In this project, the embedding rows are counted as the first layer's input.
            more = (EMBEDDED if paper else job.model.dropout) * job.units
            found[0] = replace(found[0], kept=found[0].kept + more, waiting=found[0].waiting + more)
        elif not paper:
            # The last norm keeps its input. The output layer keeps the norm's result until its weight gradient is
            # computed.
            more = job.element_bytes * job.units
            found[-1] = replace(found[-1], kept=found[-1].kept + 2 * more, waiting=found[-1].waiting + more)
        return found

    def _on(self, rank: int, what: str) -> float:
        """The sum of a field of `LayerMemory` over all layers of a rank."""
        return sum(getattr(self.stages[stage], what) for stage in self.schedule.placement.stage_of[rank])

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
        whole, paper = self.schedule.vocab is VocabMethod.NONE, job.layers is LayerKind.PAPER
        logits, scored = (tokens * job.whole_rows for tokens in (job.tokens, job.output_tokens))
        dense = job.element_bytes * job.whole_rows * job.model.hidden
        # An unsplit output layer keeps its logits from F to B (`scored`: also those of multi-token prediction), and
        # needs two more bytes per logit of one prediction while it runs.
        kept_score = {"te": 2, "logits": 8}.get(job.cross_entropy, 4)  # Both fp32 logits and their softmax.
        stages, order = placement.stage_of[rank], self.schedule.ranks[rank]
        held = max(self.stages[stage].once for stage in stages)
        scores = 0.0
        peak = (0.0, 0.0)
        own: dict[tuple[int, int], float] = {}  # Bytes that are held now, by microbatch and chunk.
        for (kind, microbatch, chunk), (taken, given), shared in zip(
            order, changes(order, Held.ACTIVATIONS), self.shared(rank), strict=True
        ):
            stage, account = stages[chunk], (microbatch, chunk)
            here, has_output = self.stages[stage], whole and stage == placement.stages - 1
            left = split and kind is not PassKind.BW  # A later W computes the weight gradient.
            if taken:
                held += here.kept - own.get(account, 0.0)
                own[account] = here.kept
            after = held
            if given and kind is PassKind.O:
                after -= self.offloaded(stage)
                own[account] -= self.offloaded(stage)
            elif given:
                after -= own.pop(account)
            elif left and kind is PassKind.B:
                # Layer by layer, the tensors that wait for W replace the tensors that were kept for B.
                after -= own[account] - here.waiting
                own[account] = here.waiting
            layers, vocabulary = held, scores + shared  # Bytes during the pass.
            moments = []  # The same at its other moments.
            if kind is PassKind.F:
                layers += here.forward
                if has_output:
                    scores += kept_score * scored
                    moments.append((held, scores + shared + 2 * logits))
            elif kind is PassKind.B or kind is PassKind.BW:
                layers += here.backward + left * max(0.0, here.waiting - here.kept)
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
                    fewer = here.waiting - SPLIT_BACKWARD * job.units if left and paper else 0.0
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

    def offloaded(self, stage: int) -> float:
        """Bytes of activations that leave the device when a virtual stage is offloaded.

        Small tensors stay on the device. Logits of an unsplit output layer also stay, because the backward of the last
        stage follows at once.
        """
        return max(0.0, self.stages[stage].kept - self.stages[stage].small)

    def host(self, rank: int) -> float:
        """Host memory of a rank's offloaded activations in bytes.

        Each chunk has its own buffers, enough for the largest number of microbatches whose activations are on the host
        at once.
        """
        order, stages = self.schedule.ranks[rank], self.schedule.placement.stage_of[rank]
        spans: dict[int, list[tuple[int, int]]] = {}
        for first, last in lives(order, Held.HOST_ACTIVATIONS):
            spans.setdefault(order[first].chunk, []).append((first, last))
        return sum(_most_at_once(each) * self.offloaded(stages[chunk]) for chunk, each in spans.items())


def _most_at_once(spans: Sequence[tuple[int, int]]) -> int:
    """Largest number of `spans` that overlap at any position; each span includes both of its ends."""
    ends = [(first, 1) for first, _ in spans] + [(last + 1, -1) for _, last in spans]
    return max(accumulate(change for _, change in sorted(ends)))
