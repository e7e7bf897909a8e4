"""How long messages and collectives take: NVLink or the like inside a node, the network between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vp.cost.constants import Constants
from megatron_vp.cost.hardware import Hardware
from megatron_vp.cost.shapes import Job
from megatron_vp.schedule import Channel, CollectiveKind, Placement, VocabMethod

LINK_SHARE = 0.7
"""Share of the nominal NVLink bandwidth that NCCL reaches with messages of some ten megabytes."""

LATENCY = 8e-6
"""Seconds of a message, and of each step of a ring."""


@dataclass(frozen=True)
class CommunicationModel:
    """Times in seconds on the machines of `job`: pipeline ranks lie outermost, as in Megatron, a node after another."""

    job: Job
    hardware: Hardware
    constants: Constants

    def node(self, rank: int) -> int:
        """Node of the first GPU of a pipeline rank."""
        return rank * self.job.gpus_per_stage // self.hardware.gpus_per_node

    def bandwidth(self, within_a_node: bool) -> float:
        """Bytes/s of one GPU."""
        if within_a_node:
            return self.hardware.link_bandwidth * LINK_SHARE
        return self.hardware.network_bandwidth * self.constants.network

    def message(self, source: int, target: int, count: float) -> float:
        """`count` bytes from one pipeline rank to another."""
        return LATENCY + count / self.bandwidth(self.node(source) == self.node(target))

    def broadcast(self, count: float, ranks: int, within_a_node: bool) -> float:
        """`count` bytes from one rank to `ranks`, pipelined along a chain; a reduction to one rank takes the same."""
        return LATENCY * ranks + count / self.bandwidth(within_a_node) if ranks > 1 else 0.0

    def all_reduce(self, count: float, ranks: int, within_a_node: bool) -> float:
        """Sum of `count` bytes over a ring of `ranks`."""
        if ranks == 1:
            return 0.0
        return 2 * (LATENCY * ranks + count * (ranks - 1) / ranks / self.bandwidth(within_a_node))

    @property
    def whole_hidden_bytes(self) -> float:
        """Bytes of a microbatch's hidden states."""
        return self.job.element_bytes * self.job.tokens * self.job.model.hidden

    @property
    def hidden_bytes(self) -> float:
        """The same on one rank."""
        return self.whole_hidden_bytes / (self.job.tensor if self.job.sequence_parallel else 1)

    @property
    def tensor_sum(self) -> float:
        """Hidden states summed over the tensor ranks of a stage; with sequence parallelism scattered and gathered."""
        near = self.job.tensor * self.job.context <= self.hardware.gpus_per_node
        return self.all_reduce(self.whole_hidden_bytes, self.job.tensor, near)

    @property
    def pipeline_in_a_node(self) -> bool:
        """Whether all pipeline ranks share a node."""
        return self.share_a_node(range(self.job.pipeline))

    def share_a_node(self, ranks: Sequence[int]) -> bool:
        """Whether all these pipeline ranks do."""
        return self.node(min(ranks)) == self.node(max(ranks))

    def messages(self, placement: Placement) -> dict[tuple[int, int, Channel], float]:
        """Every message between neighbouring stages."""
        took = {}
        for stage in range(placement.stages - 1):
            here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
            if here != there:
                took[here, there, Channel.ACTIVATION] = self.message(here, there, self.hidden_bytes)
                took[there, here, Channel.GRADIENT] = self.message(there, here, self.hidden_bytes)
        return took

    def collectives(self, method: VocabMethod, members: Sequence[int] = ()) -> dict[CollectiveKind, float]:
        """Every collective of a microbatch over the pipeline ranks, and what the tensor ranks of a stage add to it.

        `members`: the pipeline ranks that take part; none stands for all. Embedding rows travel once, in each of the
        pipelines side by side those that its own shards hold.
        """
        members = members or range(self.job.pipeline)
        p, near = len(members), self.share_a_node(members)
        hidden, whole = self.broadcast(self.hidden_bytes, p, near), self.tensor_sum
        gathered, summed = (whole / 2, whole / 2) if self.job.sequence_parallel else (0.0, whole)
        rows = self.broadcast(self.whole_hidden_bytes / self.job.tensor, p, near)
        statistics = self.all_reduce(3 * 4 * self.job.tokens, p, near)
        return {
            CollectiveKind.EMBED: rows + whole,
            CollectiveKind.C0: hidden + gathered,
            CollectiveKind.C1: statistics + (hidden + summed if method is VocabMethod.VOCAB_2 else 0.0),
            CollectiveKind.C2: hidden + summed,
            CollectiveKind.EMBED_GRAD: rows,
        }

    def synchronous_vocabulary(self) -> float:
        """What V waits for: the all-reduces of the embedding, the input gradient and the statistics."""
        p, near = self.job.pipeline, self.pipeline_in_a_node
        sums = 2 * (self.all_reduce(self.hidden_bytes, p, near) + self.tensor_sum)
        return sums + self.all_reduce(3 * 4 * self.job.tokens, p, near)

    def layer_traffic(self) -> float:
        """What one layer's forward waits for: sums over the tensor ranks, and tokens to and from their experts.

        The exchange of keys and values over context ranks runs behind the attention and is not counted.
        """
        job, sums = self.job, 2 * self.tensor_sum
        if job.expert == 1:
            return sums
        near = job.tensor * job.context * job.expert <= self.hardware.gpus_per_node
        moved = self.whole_hidden_bytes * job.model.mlps_per_token * (job.expert - 1) / job.expert / job.tensor
        return sums + 2 * (LATENCY * job.expert + moved / self.bandwidth(near))

    def gradient_sync(self, shared: float, experts: float) -> float:
        """Gradients summed over the replicas, once an iteration, behind no computation.

        Of a rank's parameters all replicas have the `shared` ones, and one in `job.expert` those of its experts.
        """
        near = self.job.gpus_per_stage <= self.hardware.gpus_per_node
        width, replicas = 4 if self.job.wide_gradients else self.job.element_bytes, self.job.data * self.job.context
        of_experts = self.all_reduce(width * experts, replicas // self.job.expert, near) if experts else 0.0
        return self.all_reduce(width * shared, replicas, near) + of_experts
