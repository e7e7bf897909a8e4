"""The layouts between which checkpoints are moved: a move is a line here and a row of the compatibility page.

`test_checkpoints.py` trains in one layout, in another and again in the first, with checkpoints in between.
`scripts/compatibility.py` generates the tables of the compatibility page from the moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.mcore.case_parts import BOTH, DEEPSEEK, DISTRIBUTED, HYBRID, MOE, MUON, TIED

_SIZES = {
    "p": "pipeline_model_parallel_size",
    "t": "tensor_model_parallel_size",
    "e": "expert_model_parallel_size",
}
_TWO_CHUNKS = ("interleaved", "v-half", "v-min", "zb-v")


@dataclass(frozen=True)
class Layout:
    """How a run is laid out.

    ranks: processes.
    stages: virtual stages of the pipeline.
    options: long argument names with underscores.
    """

    ranks: int
    stages: int
    options: Mapping[str, object]

    @classmethod
    def read(cls, text: str) -> Layout:
        """A layout written as `METHOD [pN] [tN] [dN] [eN] [VN] [rN,N...]`.

        METHOD is `plain` or `schedule/algorithm`, the algorithm `none` without --vocab-parallel. p, t and e are sizes
        of pipeline, tensor and expert parallelism, d is the number of replicas, each 1 where it is left out. V is the
        number of rows that --make-vocab-size-divisible-by pads the vocabulary to, r the rows of each pipeline rank.
        """
        method, *words = text.split()
        rows = next((word[1:] for word in words if word[0] == "r"), None)
        sizes = {"p": 1, "t": 1, "d": 1} | {word[0]: int(word[1:]) for word in words if word[0] != "r"}
        schedule, _, algorithm = method.partition("/")
        options: dict[str, object] = {_SIZES[letter]: sizes[letter] for letter in _SIZES if letter in sizes}
        if "V" in sizes:
            options["make_vocab_size_divisible_by"] = sizes["V"] // sizes["t"]
        if algorithm:
            options["pipeline_schedule"] = schedule
        if algorithm not in ("", "none"):
            options |= {"vocab_parallel": True, "vocab_parallel_algorithm": algorithm, "vocab_shards": rows or "even"}
        if schedule == "interleaved":
            options["num_virtual_stages_per_pipeline_rank"] = 2
        chunks = 2 if schedule in _TWO_CHUNKS else 1
        return cls(sizes["p"] * sizes["t"] * sizes["d"], sizes["p"] * chunks, options)


@dataclass(frozen=True)
class Move:
    """A model's moves from one layout to each of several others, and back.

    name: the row's title on the page.
    start: the layout that trains first and last, as `Layout.read` takes it.
    others: the layouts between.
    options: what all runs have in common, as long argument names with underscores.
    default: the move to the first of the others runs by default; all others run with `-m slow`.
    carried: no step is trained in the other layout, and training goes on bit for bit. Else two steps are, and every
        loss and gradient norm is within 1e-6 of those of a run that was never moved.
    """

    name: str
    start: str
    others: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    default: bool = False
    carried: bool = False

    @property
    def pads(self) -> bool:
        """Padding rows take part in the softmax, so that another number of them is another loss."""
        return " V" in self.start


RESHARDABLE = {**DISTRIBUTED, "dist_ckpt_optim_fully_reshardable": True}
GATHERED_ON_HOST = {**RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": True}
ASYNCHRONOUS = {"async_save": True, "async_strategy": "mcore", "use_persistent_ckpt_worker": True}
AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
LONG_HYBRID = {**HYBRID, "hybrid_layer_pattern": "*-" * 6}

MOVES = (
    Move(
        "a V in plain Megatron",
        "v-half/vocab-1 p3",
        ("plain p2", "plain", "plain p4", "1f1b/vocab-2 p2", "interleaved/vocab-2 p2", "zb-v/vocab-2 p2"),
        default=True,
    ),
    Move("another V in plain Megatron, tied", "zb-v/vocab-2 p2", ("plain p4", "plain p2", "plain"), TIED),
    Move(
        "plain Megatron's",
        "plain p2",
        (
            "1f1b/vocab-2 p3",
            "1f1b/vocab-1 p4",
            "interleaved/vocab-2 p3",
            "v-half/vocab-2 p3",
            "v-min/vocab-2 p4",
            "zb-v/vocab-1 p2",
            "interlaced/vocab-1 p2",
            "zb-h1/none p3",
            "interleaved/none p2",
            "v-half/none p2",
        ),
    ),
    Move(
        "assigned vocabulary shards",
        "1f1b/vocab-2 p3 r0,26,14",
        (
            "plain p2",
            "v-half/vocab-1 p2 r40,0",
            "1f1b/vocab-1 p4 r5,0,35,0",
            "1f1b/vocab-2 p2 t2 r12,28",
            "1f1b/vocab-2 p3",
            "plain t2",
        ),
    ),
    Move(
        "assigned vocabulary shards, tied, fully reshardable",
        "v-half/vocab-2 p2 r0,40",
        ("1f1b/vocab-2 p2 d2 r24,16", "plain p2", "interleaved/vocab-2 p3 r3,37,0", "plain p2 t2 d2"),
        {**RESHARDABLE, **TIED},
    ),
    Move(
        "assigned vocabulary shards, multi-token prediction",
        "1f1b/vocab-2 p3 r22,18,0",
        ("plain p2", "v-half/vocab-2 p2 r0,40"),
        AHEAD,
    ),
    Move(
        "assigned vocabulary shards, hybrid model",
        "1f1b/vocab-2 p2 r40,0",
        ("plain p2", "1f1b/vocab-2 p3 r0,0,40"),
        LONG_HYBRID,
    ),
    Move(
        "assigned vocabulary shards, other paddings",
        "plain p2 V40",
        ("1f1b/vocab-2 p3 r0,12,32 V44", "v-half/vocab-2 p2 r48,0 V48"),
    ),
    Move(
        "several chunks per rank",
        "interleaved/vocab-1 p2",
        ("1f1b/vocab-2 p2", "v-half/vocab-2 p2", "zb-h1/none p2", "v-half/none p3"),
    ),
    Move(
        "tensor parallelism, tied, fully reshardable",
        "1f1b/vocab-2 p2",
        ("plain t2", "plain p2 t2", "1f1b/vocab-2 p2 t2", "v-half/vocab-1 p3 t2"),
        {**RESHARDABLE, **TIED},
    ),
    Move(
        "tensor parallelism, several chunks per rank",
        "v-half/vocab-2 p2 t2",
        ("plain", "1f1b/vocab-1 p3", "interleaved/vocab-2 p2 t2", "zb-h1/none p2"),
    ),
    Move("tensor parallelism, whole vocabulary layers", "zb-h1/none p2", ("v-half/none p2 t2", "plain t2", "plain p4")),
    Move(
        "everything overlapped, fully reshardable",
        "1f1b/vocab-2 p2 d2",
        ("plain", "plain p2 d2", "v-half/vocab-2 p3", "interleaved/vocab-1 p2", "zb-v/none p2 d2"),
        {**BOTH, **RESHARDABLE},
    ),
    Move(
        "fully reshardable, gathered on the host",
        "v-half/vocab-2 p2 d2",
        ("plain p2", "1f1b/vocab-2 p3"),
        {**GATHERED_ON_HOST, **TIED},
    ),
    Move(
        "the distributed optimizer's default format, which fits one layout: other replicas, algorithm and schedule",
        "1f1b/vocab-2 p2",
        ("1f1b/vocab-2 p2 d2", "zb-h1/vocab-1 p2", "interlaced/vocab-1 p2"),
        DISTRIBUTED,
    ),
    Move(
        "the default format in a V",
        "v-half/vocab-2 p2",
        ("v-half/vocab-2 p2 d2", "zb-v/vocab-1 p2", "v-min/vocab-2 p2"),
        {**DISTRIBUTED, **TIED},
    ),
    Move("saved asynchronously", "1f1b/vocab-2 p2", ("plain p2", "v-half/vocab-1 p3"), ASYNCHRONOUS),
    Move(
        "saved asynchronously, fully reshardable",
        "v-half/vocab-2 p2 d2",
        ("plain", "1f1b/vocab-2 p3"),
        {**ASYNCHRONOUS, **RESHARDABLE},
    ),
    Move(
        "multi-token prediction",
        "1f1b/vocab-2 p3",
        ("plain p2", "plain", "v-half/vocab-1 p2", "interleaved/vocab-2 p2", "zb-h1/none p2"),
        AHEAD,
    ),
    Move(
        "multi-token prediction, tied, fully reshardable",  # Megatron's own stages cannot save it so
        "v-half/vocab-2 p2",
        ("1f1b/vocab-1 p3",),
        {**AHEAD, **TIED, **RESHARDABLE},
    ),
    Move("hybrid model", "1f1b/vocab-2 p3", ("plain p2", "plain", "v-half/vocab-1 p2"), LONG_HYBRID),
    Move(
        "hybrid model, tied, fully reshardable",
        "v-half/vocab-2 p2",
        ("plain p2", "interleaved/vocab-2 p3"),
        {**LONG_HYBRID, **TIED, **RESHARDABLE},
    ),
    Move("mixture of experts", "v-half/vocab-2 p2", ("plain", "zb-h1/none p3"), MOE),
    Move(
        "expert parallelism, fully reshardable",
        "1f1b/vocab-2 p2 d2 e2",
        ("plain p2 d2 e2", "v-half/vocab-1 p2 d2 e2"),
        {**MOE, **RESHARDABLE},
    ),
    Move(
        "DeepSeek-V3's layers, multi-token prediction",
        "v-half/vocab-2 p2",
        ("plain p2", "plain", "interleaved/vocab-1 p2", "zb-h1/none p2", "1f1b/vocab-2 p3"),
        {**DEEPSEEK, **AHEAD, "moe_layer_freq": "([0]+[1]*11)"},
    ),
    Move(
        "bf16, fully reshardable, tied",
        "v-half/vocab-2 p3",
        ("plain p2", "plain t2", "1f1b/vocab-2 p2 d2"),
        {**RESHARDABLE, **TIED, "bf16": True},
        carried=True,
    ),
    Move(
        "bf16",
        "1f1b/vocab-2 p2",
        ("plain", "v-half/vocab-1 p3", "1f1b/vocab-2 p2 t2"),
        {"bf16": True},
        carried=True,
    ),
    Move(
        "fp16, loss scaling",
        "1f1b/vocab-2 p3",
        ("plain p2", "v-half/vocab-1 p2"),
        {"fp16": True, "initial_loss_scale": 1024},
        carried=True,
    ),
    Move("Muon", "1f1b/vocab-2 p3", ("plain p2", "v-half/vocab-1 p2", "plain t2"), MUON, carried=True),
    Move(
        "Muon, distributed layer by layer, tied, bf16, fully reshardable",
        "v-half/vocab-2 p2 d2",
        ("plain p2 d2", "1f1b/vocab-2 p3 d2", "plain p2"),
        {**MUON, **RESHARDABLE, **TIED, "bf16": True},
        carried=True,
    ),
    Move(
        "other paddings, as plain Megatron moved alike",
        "plain p2 V40",
        ("1f1b/vocab-2 p3 V44", "v-half/vocab-2 p2 V48", "plain p4 V44"),
    ),
    Move(
        "other paddings, tied",
        "1f1b/vocab-2 p3 V44",
        ("plain V40", "v-half/vocab-2 p2 V48", "plain t2 V48"),
        TIED,
    ),
    Move(
        "other paddings, tensor parallelism, fully reshardable",
        "v-half/vocab-1 p2 t2 V48",
        ("plain p2 V40", "1f1b/vocab-2 p3 V44"),
        RESHARDABLE,
    ),
)
