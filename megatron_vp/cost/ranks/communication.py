"""Computes times of messages and collectives inside a node (over NVLink or similar) and between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.fp8 import gathered_share
from megatron_vp.cost.layers.layer_operations import Op, distinct
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.schedule import Channel, CollectiveKind, Placement, VocabMethod

LINK_SHARE = 0.7
"""Share of the nominal NVLink bandwidth that NCCL reaches with messages of about ten megabytes."""

EXPOSED_SUM = 0.4
"""Share of tensor-parallel communication time that `--tp-comm-overlap` cannot hide. The option splits each transfer
into pieces, and the first and the last piece have no matrix product to overlap with.
"""

BUCKET = 40e6
"""Number of parameters in a gradient bucket. Megatron's default is this number or a million per replica, whichever is
larger. No backward remains to hide the last bucket's reduction.
"""

CONTENTION = 0.6
"""A hidden collective delays matrix products by this fraction of the collective's duration, because both use SMs and
memory bandwidth. The value was chosen by hand, from a published run whose experts' exchange is hidden.
"""

LATENCY, NETWORK_LATENCY = 2e-6, 12e-6
"""Latency per hop of a message or collective in seconds, inside a node and between nodes. NCCL's own tuning tables
assume 0.6 to 3.4 microseconds inside a node and 2.7 to 14 between nodes, depending on the protocol.
"""


@dataclass(frozen=True)
class CommunicationModel:
    """Communication times in seconds for `job`; as in Megatron, a stage's GPUs have consecutive ranks.

    The methods' parameter `nodes` is the number of nodes over which a collective's members are distributed. Between
    nodes, a collective uses the network bandwidth of one GPU per node, even if several GPUs of a node are members. Only
    `replicas_sum` adds up the bandwidth of all members on a node.
    """

    job: Job
    hardware: Hardware

    def node(self, rank: int) -> int:
        """Index of the node with a pipeline rank's first GPU."""
        return rank * self.job.gpus_per_stage // self.hardware.gpus_per_node

    def bandwidth(self, within_a_node: bool) -> float:
        """Bytes/s that one GPU can send inside a node or between nodes."""
        if within_a_node:
            return self.hardware.link_bandwidth * LINK_SHARE
        return self.hardware.network_bandwidth * self.hardware.constants.network

    def message(self, source: int, target: int, count: float) -> float:
        """Seconds to send `count` bytes from one pipeline rank to another."""
        near = self.node(source) == self.node(target)
        return (LATENCY if near else NETWORK_LATENCY) + count / self.bandwidth(near)

    def nodes(self, gpus: int) -> int:
        """The number of nodes that `gpus` neighbouring GPUs occupy."""
        return math.ceil(gpus / self.hardware.gpus_per_node)

    def hops(self, ranks: int, nodes: int) -> float:
        """Latency of one trip around a ring of `ranks` ranks on `nodes` nodes; the ring leaves each node once."""
        crossings = min(ranks, nodes) if nodes > 1 else 0
        return LATENCY * (ranks - crossings) + NETWORK_LATENCY * crossings

    def broadcast(self, count: float, ranks: int, nodes: int) -> float:
        """Seconds to broadcast `count` bytes to `ranks` ranks, pipelined along a chain; a reduction takes as long."""
        return self.hops(ranks, nodes) + count / self.bandwidth(nodes == 1) if ranks > 1 else 0.0

    def all_reduce(self, count: float, ranks: int, nodes: int) -> float:
        """Seconds that an all-reduce of `count` bytes over `ranks` ranks takes.

        Inside one node, the ranks form a ring. Across nodes, the nodes form a ring. The sums inside each node take no
        extra time, because they overlap with the ring's transfers.
        """
        if ranks == 1:
            return 0.0
        members = ranks if nodes == 1 else min(ranks, nodes)
        moved = count * (members - 1) / members
        return 2 * (self.hops(ranks, nodes) + moved / self.bandwidth(nodes == 1))

    @property
    def whole_hidden_bytes(self) -> float:
        """Bytes of a microbatch's hidden states, before sequence parallelism divides them among tensor ranks."""
        return self.job.element_bytes * self.job.tokens * self.job.model.hidden

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a microbatch's hidden states on one rank."""
        return self.job.element_bytes * self.job.units

    @property
    def tensor_sum(self) -> float:
        """Seconds to sum hidden states over tensor ranks (sequence parallelism: reduce-scatter and all-gather)."""
        took = self.all_reduce(self.whole_hidden_bytes, self.job.tensor, self.nodes(self.job.tensor))
        return took * EXPOSED_SUM if self.job.tensor_overlap else took

    def nodes_of(self, ranks: Sequence[int]) -> int:
        """The number of nodes that the pipeline ranks in `ranks` occupy."""
        return len({self.node(rank) for rank in ranks})

    def messages(self, placement: Placement) -> dict[tuple[int, int, Channel], float]:
        """Seconds that each message between neighbouring stages takes, by sender, receiver and channel."""
        took = {}
        for stage in range(placement.stages - 1):
            here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
            if here != there:
                took[here, there, Channel.ACTIVATION] = self.message(here, there, self.hidden_bytes)
                took[there, here, Channel.GRADIENT] = self.message(there, here, self.hidden_bytes)
        return took

    def collectives(self, method: VocabMethod, members: Sequence[int] = ()) -> dict[CollectiveKind, float]:
        """Seconds that a microbatch's collectives take, by kind, including sums and gathers over tensor ranks.

        `members` lists the pipeline ranks that take part; if it is empty, all take part. An embedding row is sent only
        to the pipeline ranks with the same tensor rank as the row's owner.
        """
        members = members or range(self.job.pipeline)
        p, nodes = len(members), self.nodes_of(members)
        hidden, whole = self.broadcast(self.hidden_bytes, p, nodes), self.tensor_sum
        gathered, summed = (whole / 2, whole / 2) if self.job.sequence_parallel else (0.0, whole)
        rows = self.broadcast(self.whole_hidden_bytes / self.job.tensor, p, nodes)
        statistics = self.all_reduce(3 * 4 * self.job.tokens, p, nodes)
        return {
            CollectiveKind.EMBED: rows + whole,
            CollectiveKind.C0: hidden + gathered,
            CollectiveKind.C1: statistics + (hidden + summed if method is VocabMethod.VOCAB_2 else 0.0),
            CollectiveKind.C2: hidden + summed,
            CollectiveKind.EMBED_GRAD: rows,
        }

    def synchronous_vocabulary(self) -> float:
        """Seconds that a pass V (interlaced) waits for all-reduces of embedding, input gradient and statistics."""
        p, nodes = self.job.pipeline, self.nodes_of(range(self.job.pipeline))
        sums = 2 * (self.all_reduce(self.hidden_bytes, p, nodes) + self.tensor_sum)
        return sums + self.all_reduce(3 * 4 * self.job.tokens, p, nodes)

    def wait(self, op: Op) -> float:
        """Seconds of exposed communication of one operation's forward."""
        if op.waits != "expert":
            return self.tensor_sum * gathered_share(self.job, op) if op.waits else 0.0
        job, took = self.job, 0.0
        own = self.whole_hidden_bytes * job.model.experts_per_token * job.capacity / job.tensor
        if job.expert_tensor > 1:
            # An expert's tensor ranks all-gather its tokens and reduce-scatter the results.
            took = self.all_reduce(own * job.expert_tensor, job.expert_tensor, self.nodes(job.expert_tensor))
        if job.expert == 1:
            return took
        exchange = 2 * self.dispatch(own, job.model.experts_per_token)
        return took + (CONTENTION * exchange if job.expert_overlap else exchange)

    def dispatch(self, count: float, per_token: int) -> float:
        """Seconds to send a rank's tokens to their experts or back.

        `count` is the size of the tokens in bytes, counting each token once for each of its `per_token` experts. The
        flexible dispatcher sends a token over the network once to each node that needs it, and over NVLink once to each
        rank that needs it. The network and NVLink work in parallel.
        """
        ranks, nodes = self.job.expert, min(self.job.expert, self.nodes(self.job.expert * self.job.expert_tensor))
        inside = ranks / nodes
        latency, far_share = (NETWORK_LATENCY if nodes > 1 else LATENCY), (nodes - 1) / nodes
        if not self.job.is_flexible:
            share = self.hardware.rates.all_to_all if self.hardware.rates else 1.0
            far, near = far_share / self.bandwidth(False), (inside - 1) / ranks / self.bandwidth(True)
            return latency + count * (far + near) / share
        far = count * distinct(nodes, per_token) * far_share / self.bandwidth(False)
        return latency + max(far, count * distinct(ranks, per_token) * (inside - 1) / inside / self.bandwidth(True))

    def exposed_keys(self, attention: float) -> float:
        """Seconds that a layer's forward waits for keys and values of other context ranks.

        Keys and values are passed around a ring. Meanwhile, attention runs on those that have arrived. It takes
        `attention` seconds in total.
        """
        job = self.job
        if job.context == 1:
            return 0.0
        near = self.nodes(job.tensor * job.context) == 1
        count = job.element_bytes * job.tokens * (job.keys + job.values)
        hop = (LATENCY if near else NETWORK_LATENCY) + count / self.bandwidth(near)
        return (job.context - 1) * max(0.0, hop - attention / job.context)

    def replicas_sum(self, count: float, ranks: int, spread: int) -> float:
        """Seconds to all-gather or reduce-scatter a full buffer of `count` bytes over `ranks` GPUs. These GPUs are
        distributed over the nodes of a stage with `spread` GPUs.

        Each GPU has its own network port, and the links inside a node can keep all ports busy.
        """
        if ranks == 1:
            return 0.0
        nodes = self.nodes(spread)
        moved, ports = count * (ranks - 1) / ranks, max(1, ranks // nodes)
        rate = self.bandwidth(True) if nodes == 1 else min(self.bandwidth(True), ports * self.bandwidth(False))
        return self.hops(ranks, nodes) + moved / rate

    def gradient_sync(
        self, shared: float, experts: float, narrow: float = 0.0, forward: float = 0.0, backward: float = 0.0
    ) -> float:
        """Exposed time per iteration, in seconds, for reducing gradients over the replicas and gathering parameters.

        shared: number of parameters outside experts, which all replicas hold.
        experts: number of parameters in experts, each of which is on `job.expert_replicas` ranks.
        narrow: number of parameters that are gathered in fp8.
        forward, backward: seconds of passes that can hide the gathering (forward) and the reduction (backward).
        """
        job = self.job
        replicas, total = job.data * job.context, shared + experts
        width = 4 if job.wide_gradients else job.element_bytes
        # Without a distributed optimizer, gathering is the second step of an all-reduce and moves gradients.
        gathered = (job.element_bytes * total - narrow * (job.element_bytes - 1)) / total
        gathered = gathered if job.distributed_optimizer else width

        def took(each: float) -> float:
            of_experts = self.replicas_sum(each * experts, job.expert_replicas, job.gpus_per_stage)
            return self.replicas_sum(each * shared, replicas, job.gpus_per_stage) + of_experts

        reduce, gather = took(width), took(gathered)
        if not job.distributed_optimizer:
            reduce, gather = reduce + gather, 0.0  # The all-reduce can overlap only with the backward.
        alone = max(CONTENTION, min(1.0, max(BUCKET, 1e6 * replicas) / total))
        if job.data_overlap:
            reduce = max(reduce * alone, reduce - backward)
        if job.gather_overlap:
            gather = max(gather * alone, gather - forward)
        return reduce + gather
