"""A layer as a list of operations. What the cost model knows about a layer is a sum over this list.

`LAYERS` names the blocks that make a layer of each kind, and each block is a function that lists the operations of its
forward. Weights, FLOPs, activations and seconds are sums over these lists, so a new kind of layer is a new function.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_vp.cost.layers.shapes import Job, Recompute
from megatron_vp.jobs.layer_kind import LayerKind

NORM, RESIDUAL = 4, 7
"""Bytes that a block's forward moves per hidden unit of a token for its norm, and to add the residual and copy the sum.
Dropout masks are counted separately.
"""

DROPPED = 1
"""Bytes per score for the attention dropout mask. The scores after dropout are kept as well, in the model's dtype."""

COPIES, SORTED = 8, 4
"""How often the all-to-all dispatcher reads or writes the experts' tokens. COPIES is for sorting the tokens by rank,
exchanging them, and undoing both. If a rank has several experts, SORTED is added for sorting the tokens by expert and
undoing this.
"""

FLEXIBLE, FLEXIBLE_DISTINCT = 2, 6
"""How often the flexible dispatcher reads or writes a token. FLEXIBLE applies once per expert chosen for the token, and
covers sorting the tokens by expert and restoring their order. FLEXIBLE_DISTINCT applies once per rank that has any of
the token's experts, and covers sending the token to that rank and the result back.
"""

CLAMP_FORWARD, CLAMP_BACKWARD = 16, 24
"""Bytes moved per element of an expert's gated activation to clamp its gate and linear input in 16 bits. Each of the
two is read and written, then both are copied into one tensor. The backward handles the gradients in the same way. It
also reads the gate and the linear input, and writes and reads a mask for each of them.
"""

BIAS_FORWARD, BIAS_BACKWARD = 28, 36
"""Bytes moved per element of the experts' results to multiply biases by the token's probability in fp32 and to add
them. The forward moves 4 bytes to multiply, 10 to add, 8 to concatenate and 6 to convert to 16 bits. The backward moves
6 bytes to convert to fp32, 6 to convert back, and 12 each for the gradients of the biases and of the probabilities.
"""


class Matrix(NamedTuple):
    """Weight matrices of one shape on one rank: `copies` matrices, each applied to `tokens` tokens per microbatch."""

    inputs: int
    outputs: int
    tokens: float
    copies: int = 1

    @property
    def weights(self) -> int:
        """Parameters of all `copies`."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops(self) -> float:
        """FLOPs of one microbatch's forward."""
        return 2 * self.tokens * self.inputs * self.outputs * self.copies

    @property
    def orthogonal_flops(self) -> float:
        """FLOPs of a Newton-Schulz step of Muon, which multiplies an m x n matrix, m <= n, three times: X X^T, the
        product with itself, and this with X.
        """
        m, n = sorted((self.inputs, self.outputs))
        return self.copies * (4 * m * m * n + 2 * m**3)


class Op(NamedTuple):
    """One operation of a layer's forward, for one microbatch on one rank.

    matrix: the weights that it multiplies with; None if it multiplies with none.
    parameters: parameters outside `matrix`.
    scores: FLOPs of attention, not halved for causality.
    work: FLOPs of further matrix products, which read no weights.
    moved, back: bytes that it moves outside matrix products in F and in B; `back` None: twice `moved`.
    keeps: bytes of each of its results that are kept from F to B. With split backwards, W needs as many bytes.
    frees: bytes of each further tensor that B frees.
    narrow: elements among the kept tensors that an fp8 recipe keeps in fp8 instead of in 16 bits.
    doubled: elements of its input that an fp8 recipe keeps in fp8 in addition to 16 bits.
    gradients: bytes of the temporary gradients in its backward, without and with a later W.
    narrows: whether fp8 recipes multiply its operands in fp8.
    expert: whether its weights belong to experts.
    waits: what it waits for: a sum over `tensor` ranks, or an exchange with other `expert` ranks.
    modules: names in `--recompute-modules` with which B repeats it, so that its results are not kept.
    """

    name: str
    matrix: Matrix | None = None
    parameters: int = 0
    scores: float = 0.0
    work: float = 0.0
    moved: float = 0.0
    back: float | None = None
    keeps: tuple[float, ...] = ()
    frees: tuple[float, ...] = ()
    narrow: float = 0.0
    doubled: float = 0.0
    gradients: tuple[float, float] | None = None
    waits: str = ""
    modules: tuple[str, ...] = ()
    narrows: bool = True
    expert: bool = False

    @property
    def weights(self) -> int:
        """Its parameters on one rank."""
        return self.parameters + (self.matrix.weights if self.matrix else 0)

    @property
    def flops(self) -> float:
        """FLOPs of its forward, with attention not halved for causality."""
        return self.scores + self.work + (self.matrix.flops if self.matrix else 0.0)

    @property
    def made_bytes(self) -> float:
        """Bytes of the tensors that it makes for its backward."""
        return sum(self.keeps) + sum(self.frees)

    def kept_bytes(self, job: Job) -> float:
        """Bytes that it keeps on the device from F to B."""
        away = OFFLOADED.get(self.name, "") in job.offloaded_modules
        return 0.0 if away or self.again(job) else self.made_bytes

    def again(self, job: Job) -> bool:
        """Whether the backward repeats this operation, so that its results are not kept."""
        return job.recompute is Recompute.FULL or not job.recompute_modules.isdisjoint(self.modules)


OFFLOADED = {"split": "core_attn", "proj": "attn_proj", "dispatch": "expert_fc1", "up": "moe_act"}
"""The values of `--offload-modules` with which an operation's results are kept in host memory."""

WIDE = "'"
"""Ends the kind of a layer whose matrix products run in 16 bits although the job has an fp8 recipe."""


@lru_cache(maxsize=4096)
def operations(job: Job, kind: str = "t") -> tuple[Op, ...]:
    """The operations of a layer of `kind` (see `LAYERS`), in the order of its forward. WIDE: not in fp8."""
    found = (op for block in LAYERS[kind.removesuffix(WIDE)] for op in block(job))
    if kind.endswith(WIDE):
        return tuple(op._replace(narrows=False, narrow=0.0, doubled=0.0) for op in found)
    return tuple(found)


def attention(job: Job) -> list[Op]:
    """Grouped-query or multi-latent attention.

    In latent attention, every tensor rank holds the complete down-projections. With sequence parallelism, the rank
    multiplies these only with its own tokens.
    """
    model, t, tokens, column, latent = job.model, job.tensor, job.tokens, job.column, job.model.latent
    queries, results = model.queries / t, model.results / t
    up = ("mla_up_proj",) if latent else ()
    keys, values, statistics = job.keys, job.values, tokens * 4 * model.heads / t
    own, gates = tokens / t if job.sequence_parallel else tokens, results * model.output_gate
    if latent is None:
        outputs = model.queries // t + 2 * keys + int(gates)
        kept = (*_fused(job), *((column * gates,) if gates else ()))
        products = [Op("qkv", Matrix(model.hidden, outputs, tokens), keeps=kept)]
    else:
        joined, each = latent.key_rank + latent.rotary, job.element_bytes * own
        widths = model.keys - model.heads * latent.rotary + model.values
        # The norms after the down-projections, which are parts of the up-projections, keep their inputs and results.
        products = [
            Op("kv down", Matrix(model.hidden, joined, own), keeps=(each * joined,)),
            Op("kv up", Matrix(latent.key_rank, widths // t, tokens), keeps=(each * latent.key_rank,), modules=up),
        ]
        if latent.query_rank:
            compressed = (each * latent.query_rank,)
            products.append(Op("q down", Matrix(model.hidden, latent.query_rank, own), keeps=compressed))
            matrix = Matrix(latent.query_rank, model.queries // t, tokens)
            products.append(Op("q up", matrix, keeps=compressed, modules=up))
        else:
            products.append(Op("q", Matrix(model.hidden, model.queries // t, tokens), modules=up))
    # Query and key norms, rotary embedding, and the split of the joint projection are each counted as one read and one
    # write of queries, keys and values.
    moved = (2 + 2 * model.rotary + 2 * model.query_key_norms) * column * (queries + keys + values)
    kept = tuple(column * each for each in (queries, keys, values))
    core = Op(
        "attention",
        scores=2 * tokens * job.sequence * (model.queries + model.results) / t,
        keeps=(statistics,),
        frees=() if job.layers is LayerKind.PAPER else tuple(_freed_by_attention(job, queries, results)),
        gradients=(column * (queries + results + keys + values),) * 2,
        modules=("core_attn",),
    )
    found = [_norm(job, apart=latent is not None)._replace(narrow=job.units), *products]
    found += [Op("split", moved=moved, keeps=kept, modules=up), core]
    if gates:  # The gate keeps the result of attention, and the projection that of the gate.
        found.append(Op("gate", moved=3 * column * gates, keeps=(column * results,)))
    matrix, kept = Matrix(model.results // t, model.hidden, tokens), (column * results,)
    return [*found, Op("proj", matrix, keeps=kept, doubled=tokens * results, waits="tensor"), _residual(job)]


def delta(job: Job) -> list[Op]:
    """A gated delta net: linear attention, whose FLOPs are those of Megatron's `--log-throughput`.

    It keeps the results of its projection, of its convolution, of the rule and of the gated norm; queries and keys are
    repeated for all heads of the values.
    """
    net, t, tokens, column = job.model.delta, job.tensor, job.tokens, job.column
    assert net is not None
    keys, values, hidden = net.key_heads * net.key_size / t, net.value_heads * net.value_size / t, job.model.hidden
    projected, mixed = int(2 * keys + 2 * values + 2 * net.value_heads // t), 2 * keys + values
    rule = 2 * net.value_heads / t * net.key_size + values
    convolution = Op(
        "convolution",
        parameters=int(net.kernel * mixed),
        work=2 * tokens * net.kernel * mixed,
        moved=column * (2 * mixed + rule),
        keeps=(column * rule,),
    )
    core = Op(
        "delta rule",
        work=8 * tokens * net.value_heads / t * net.value_size**2,
        moved=column * (rule + values),
        keeps=(column * values,),
        gradients=(column * (rule + values),) * 2,
    )
    gated = Op("gated norm", moved=3 * column * values, keeps=(column * values,), modules=("gdn_norm_out",))
    return [
        _norm(job)._replace(narrow=job.units),
        Op("in", Matrix(hidden, projected, tokens), keeps=(column * projected,)),
        *(convolution, core, gated),
        Op("proj", Matrix(int(values), hidden, tokens), doubled=tokens * values, waits="tensor"),
        _residual(job),
    ]


def head(job: Job) -> list[Op]:
    """What multi-token prediction adds before and behind the layers of a head: the norms of hidden states and of the
    embedding, their joint projection, and the last norm.
    """
    size, hidden, t = job.element_bytes * job.units, job.model.hidden, job.tensor
    return [
        Op("norms", parameters=4 * hidden, moved=2 * NORM * job.units, keeps=(size, 2 * size), narrow=2 * job.units),
        Op("joint", Matrix(2 * hidden, hidden // t, job.tokens), keeps=(size,), waits="tensor"),
        Op("last norm", parameters=2 * hidden, moved=NORM * job.units, keeps=(size,)),
    ]


def _freed_by_attention(job: Job, queries: float, results: float) -> list[float]:
    """Bytes of the tensors that only the backward of attention, and of the norms of queries and keys, needs."""
    model, t, tokens, column = job.model, job.tensor, job.tokens, job.column
    wide, keys, local, freed = job.element_bytes, job.keys, job.layers is not LayerKind.ENGINE, []
    if model.query_key_norms:
        # The norms keep their inputs. Transformer Engine copies these inputs out of the projection's result. A local
        # layer keeps the whole result and, with grouped-query attention, also a copy of the queries.
        freed = [column * queries, float(column * keys)]
        freed += [4 * tokens * model.heads / t, 4.0 * tokens * max(model.kv_groups // t, 1)]
        if local:
            freed += [column * (keys + (queries if model.kv_groups < model.heads else 0))]
    if local and model.rotary:
        # Sines and cosines are kept in the model's dtype, once for queries and once for keys.
        rotated = model.latent.rotary if model.latent else model.head_size
        freed += [wide * rotated * job.sequence / job.context] * 4
    if job.layers is LayerKind.LOCAL_SDPA and job.context > 1:
        # With context parallelism, attention keeps keys and values of whole sequences, and a copy of its result.
        freed.append(column * ((keys + job.values) * (job.context - 1) + results))
    if job.layers is LayerKind.LOCAL:
        # Keys and values are repeated for all heads of a group. The kept scores replace the statistics.
        kept = wide + (4 if job.wide_softmax and wide < 4 else 0) + job.attention_dropout * (wide + DROPPED)
        freed.append(2 * column * (queries - keys) + kept * job.scores - 4 * tokens * model.heads / t)
    return freed


def mlp(job: Job) -> list[Op]:
    """A dense MLP."""
    width, again = job.model.dense_ffn or job.model.ffn, ("mlp",)
    inner = _inner(job, Matrix(0, width // job.tensor, job.tokens), width / job.tensor * job.tokens, again, job.units)
    inner[0] = inner[0]._replace(keeps=(*_fused(job), *inner[0].keeps))
    return [_norm(job), *inner, _residual(job)]


def experts(job: Job) -> list[Op]:
    """A router, the experts that it chooses for each token, and an expert that all tokens share, if there is one."""
    model, t, tokens, wide = job.model, job.tensor, job.tokens, job.element_bytes
    if not model.experts:
        return mlp(job)
    again, per_token = ("moe",), model.experts_per_token
    router = Op("router", Matrix(model.hidden, model.experts, tokens), narrows=False, modules=again)
    found = [_norm(job, apart=True), router]
    if model.shared_ffn:
        matrix, both = Matrix(0, model.shared_ffn // t, tokens), (*again, "shared_experts")
        found += _inner(job, matrix, model.shared_ffn / t * tokens, both, job.units, "shared ")
        if model.shared_gate:
            moved = 3 * wide * job.units
            found.append(Op("shared gate", Matrix(model.hidden, 1, tokens), moved=moved, narrows=False, modules=both))
    copies = max(1, model.experts // job.expert)
    filled = per_token * job.capacity
    routed, elements = tokens * filled / copies * job.expert_tensor / t, model.ffn / t * tokens * filled
    # Together with the norm's result, each chosen expert and the shared one keep their input.
    kept = wide * job.units * (filled - 1 + bool(model.shared_ffn))
    moved = expert_copies(job) * wide * filled * model.hidden / t * tokens
    matrix = Matrix(0, model.ffn // job.expert_tensor, routed, copies)
    inside = [Op("dispatch", moved=moved, keeps=(kept,), waits="expert", modules=again)]
    inside += _inner(job, matrix, elements, again, filled * job.units)
    if job.reserved != 1:  # Buffers have room for more tokens than the experts get.
        inside = [op._replace(keeps=tuple(job.reserved * each for each in op.keeps)) for op in inside]
    if job.paged:
        moved = 2 * sum(sum(op.keeps) for op in inside if not op.again(job))
        inside.append(Op("stash", moved=moved, back=moved))
    found += inside
    if model.clamped:  # Megatron fuses neither clamped activations nor experts' biases.
        results = tokens * filled / t * model.hidden * model.expert_biases
        found.append(
            Op("clamp", moved=CLAMP_FORWARD * elements, back=CLAMP_BACKWARD * elements, modules=("moe", "moe_act"))
        )
        found.append(Op("biases", moved=BIAS_FORWARD * results, back=BIAS_BACKWARD * results))
    return [*found, _residual(job)]


def _inner(
    job: Job, matrix: Matrix, elements: float, again: tuple[str, ...], narrow: float, prefix: str = ""
) -> list[Op]:
    """Both products of an MLP and its activation function.

    matrix: its width, tokens and copies on one rank.
    elements: elements of one tensor between the products.
    narrow: elements of the first product's input.
    """
    model, size = job.model, job.element_bytes * elements
    halves, routed = 2 if model.gated else 1, again == ("moe",)
    up = matrix._replace(inputs=model.hidden, outputs=halves * matrix.outputs)
    down = matrix._replace(inputs=matrix.outputs, outputs=model.hidden)
    freed = (size,) * (0 if job.layers is LayerKind.PAPER else job.glu_intermediates)
    return [
        Op(prefix + "up", up, keeps=(size,) * halves, narrow=narrow, modules=again, expert=routed),
        Op(
            prefix + "activation",
            moved=(halves + 1) * size,
            keeps=(size,),
            frees=freed,
            narrow=elements,
            gradients=None if prefix else (halves * size, (halves + 1) * size),
            modules=(*again, "moe_act") if routed else again,
        ),
        Op(prefix + "down", down, waits="" if routed else "tensor", modules=again, expert=routed),
    ]


def _norm(job: Job, apart: bool = False) -> Op:
    """The norm at a block's start. Unless it is `apart`, the next product keeps its result; see `_fused`."""
    apart = apart or job.layers is not LayerKind.ENGINE
    kept, modules = ((job.element_bytes * job.units,), ("layernorm",)) if apart else ((), ())
    return Op("norm", parameters=2 * job.model.hidden, moved=NORM * job.units, keeps=kept, modules=modules)


def _fused(job: Job) -> tuple[float, ...]:
    """What the first product of a block keeps if Transformer Engine fuses it with the norm."""
    return (job.element_bytes * job.units,) if job.layers is LayerKind.ENGINE else ()


def _residual(job: Job) -> Op:
    """The residual addition at a block's end, whose result the next block keeps as its input."""
    dropped = job.model.dropout * job.units
    return Op(
        "residual",
        moved=(RESIDUAL + job.model.dropout) * job.units,
        keeps=(job.element_bytes * job.units,),
        frees=(dropped,) if dropped else (),
    )


LAYERS = {
    "t": (attention, experts),
    "d": (attention, mlp),
    "*": (attention,),
    "-": (mlp,),
    "E": (experts,),
    "G": (delta,),
    "g": (delta, experts),
    "h": (delta, mlp),
    "m": (head,),
}
"""The blocks of each kind of layer. t: a layer of a GPT model; d: its layer without experts, if other layers have some;
g, h: the same with a gated delta net instead of attention; m: a head of multi-token prediction, without its layers;
other letters: those of hybrid models. An attention letter and an MLP letter together make a transformer layer.
"""


def distinct(places: int, per_token: int) -> float:
    """Expected number of different places that hold a token's `per_token` experts, divided by `per_token`.

    Each expert is in one of `places` places, chosen uniformly.
    """
    return places * (1 - (1 - 1 / places) ** per_token) / per_token


def expert_copies(job: Job) -> float:
    """Number of times that the dispatcher reads or writes a token in one layer, divided by the number of the token's
    experts.
    """
    if job.is_flexible:
        return FLEXIBLE + FLEXIBLE_DISTINCT * distinct(job.expert, job.model.experts_per_token)
    return COPIES + SORTED * (job.model.experts > job.expert)


def layer_weights(job: Job, kind: str = "t") -> int:
    """Parameters of one layer on one rank, including its norms."""
    return sum(op.weights for op in operations(job, kind))


def layer_flops(job: Job, kind: str = "t") -> float:
    """FLOPs of one layer's forward for a microbatch on one rank, with attention not halved for causality."""
    return sum(op.flops for op in operations(job, kind))
