"""Test random combinations of sizes, a schedule, vocabulary shards and Megatron's options against plain Megatron.

`matrix.toml` lists what people train; random jobs find combinations that it lacks. The same number gives the same job.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.harness.training import comparable_model, train
from tests.mcore.case_parts import (
    BOTH,
    CONTEXT,
    DISTRIBUTED,
    DOCUMENTS,
    DROPOUT,
    FP32,
    FULL_RECOMPUTE,
    GROUPS,
    MOE,
    MUP,
    SGD,
    TIED,
)
from tests.mcore.comparison import assert_equal

JOBS = (3, 5, 6, 7, 8, 11, 12, 15, 19, 20, 27, 28, 32, 34, 35, 39)
"""With every feature below, and every schedule with and without whole layers and with vocabulary shards of any size."""
ROWS = 40
"""Of a vocabulary that is cut at random places."""
NO_GRADIENT = "k_layernorm.bias"
"""Adds the same to all scores of a query: its gradient is zero, and what is found is rounding."""
CHUNKS = {"1f1b": 1, "zb-h1": 1, "interlaced": 1, "interleaved": 2, "zb-v": 2, "v-half": 2, "v-min": 2}


@dataclass
class RandomJob:
    """A job for plain Megatron (`options`) and for us (`options` and `ours`) on the same ranks.

    sizes: of the parallel dimensions, by the first word of their names; `data` are the replicas.
    masked: a part of the tokens is left out of the loss.
    bound: of relative distances. A norm of queries and keys has gradients that nearly cancel: rounding weighs more.
    """

    schedule: str
    whole_layers: bool
    sizes: dict[str, int]
    options: dict[str, object]
    ours: dict[str, object]
    masked: bool

    @property
    def ranks(self) -> int:
        """Processes."""
        return math.prod(self.sizes.values())

    @property
    def bound(self) -> float:
        return 5 * FP32 if "qk_layernorm" in self.options else FP32

    def has(self, **options: object) -> bool:
        """Whether it has these options already, with these values."""
        return all(self.options.get(name) == value for name, value in options.items())


@dataclass(frozen=True)
class Feature:
    """Options that a job has with a probability where they fit what was chosen before them."""

    probability: float
    options: Mapping[str, object]
    fits: Callable[[RandomJob], bool] = lambda job: True


def _rotary(job: RandomJob) -> bool:
    return job.has(position_embedding_type="rope")


def _linear(job: RandomJob) -> bool:
    """One chunk per rank: dropout draws the masks that plain Megatron draws."""
    return CHUNKS[job.schedule] == 1


def _one_owner(job: RandomJob) -> bool:
    """Both chunks of a V's first rank would hold the word embedding."""
    return not (job.whole_layers and job.schedule in ("zb-v", "v-half", "v-min"))


def _aligned(job: RandomJob) -> bool:
    """Plain Megatron itself fails with further heads, tied, when it reduces gradients as stages finish."""
    return not job.has(no_align_grad_reduce=True, **TIED)


def _masks_everywhere(job: RandomJob) -> bool:
    """Megatron hands attention masks to the first and to the last rank: others' layers look across documents, and which
    layers those are depends on the chunks."""
    return _linear(job) or (job.schedule == "interleaved" and job.sizes["pipeline"] == 2)


# In the order of drawing.
FEATURES = (
    Feature(0.6, {"sequence_parallel": True}, lambda d: d.sizes["tensor"] == 2),
    Feature(0.3, {"core_attention": "sdpa"}),
    Feature(0.6, {"position_embedding_type": "rope"}, lambda d: not _rotary(d)),
    Feature(0.3, {"position_embedding_type": "none"}, lambda d: not _rotary(d)),
    Feature(0.3, {"rotary_percent": 0.5}, _rotary),
    Feature(0.4, TIED, _one_owner),
    Feature(0.5, {"normalization": "RMSNorm"}),
    Feature(0.4, {"swiglu": True}),
    Feature(0.2, {"squared_relu": True}, lambda d: not d.has(swiglu=True)),
    Feature(0.4, {"group_query_attention": True, "num_query_groups": 2}),
    Feature(0.3, {"disable_bias_linear": True}),
    Feature(0.2, {"qk_layernorm": True}),
    Feature(0.2, {"add_qkv_bias": True}),
    Feature(0.1, {"kv_channels": 8}),
    Feature(0.15, FULL_RECOMPUTE),
    Feature(0.2, {"recompute_granularity": "selective"}, lambda d: "recompute_granularity" not in d.options),
    Feature(0.4, DISTRIBUTED),
    Feature(0.5, BOTH, lambda d: d.has(**DISTRIBUTED)),
    Feature(0.3, {"overlap_grad_reduce": True}),
    Feature(0.3, {"no_align_grad_reduce": True}, lambda d: d.has(overlap_grad_reduce=True)),
    Feature(0.25, {"ddp_bucket_size": 2000}),
    Feature(0.1, {"ddp_average_in_collective": True}),
    Feature(0.25, {"calculate_per_token_loss": True}, lambda d: "ddp_average_in_collective" not in d.options),
    Feature(0.2, {"mtp_num_layers": 2}, lambda d: _rotary(d) and _one_owner(d) and _aligned(d)),
    Feature(0.3, {"mtp_use_repeated_layer": True}, lambda d: d.has(mtp_num_layers=2)),
    Feature(0.2, MOE, lambda d: d.sizes["tensor"] == 1 or d.has(sequence_parallel=True)),
    Feature(0.5, {"expert_model_parallel_size": 2}, lambda d: d.has(**MOE) and d.sizes["data"] == 2),
    Feature(0.3, {"moe_shared_expert_intermediate_size": 64, "moe_z_loss_coeff": 1e-3}, lambda d: d.has(**MOE)),
    Feature(0.15, MUP),
    Feature(0.15, GROUPS),
    Feature(0.1, SGD, lambda d: not d.has(**DISTRIBUTED)),
    Feature(0.15, {"clip_grad": 0.1}),
    Feature(0.1, DROPOUT, _linear),
    Feature(0.1, {"embedding_init_method_std": 0.01}),
    Feature(0.1, DOCUMENTS, lambda d: _masks_everywhere(d) and "core_attention" not in d.options),
    Feature(0.1, {"use_tp_pp_dp_mapping": True}, lambda d: d.sizes["context"] == 1 and "num_experts" not in d.options),
    Feature(0.1, {"timing_log_level": 2, "log_params_norm": True, "log_num_zeros_in_grad": True}),
    Feature(0.1, {"deterministic_mode": True}),
)


def _random_rows(chance: random.Random, ranks: int, unit: int) -> list[int]:
    """The vocabulary's rows by pipeline rank; in half of the cases one rank has none, for random ends seldom meet."""
    cuts = sorted(chance.randint(0, ROWS // unit) * unit for _ in range(ranks - 1))
    rows = [end - start for start, end in zip([0, *cuts], [*cuts, ROWS], strict=True)]
    if chance.random() < 0.5:
        rows[chance.randrange(ranks)] = 0
        rows[max(range(ranks), key=rows.__getitem__)] += ROWS - sum(rows)
    return rows


def random_job(number: int) -> RandomJob:
    """The job of this number, on at most 8 ranks."""
    chance = random.Random(number)
    schedule = chance.choice(tuple(CHUNKS))
    whole_layers = schedule not in ("1f1b", "interlaced") and chance.random() < 0.3
    chunks = CHUNKS[schedule]
    sizes = {"pipeline": chance.choice((2, 2, 2, 3, 4))}
    for name, probability in (("tensor", 0.25), ("context", 0.2), ("data", 0.4)):
        fits = 2 * math.prod(sizes.values()) <= 8
        sizes[name] = 2 if fits and chance.random() < probability else 1
    micro_batch, microbatches = chance.choice((1, 2, 2, 3)), chance.choice((1, 2, 3, 4, 5, 7, 8))
    if schedule == "interleaved":
        microbatches = sizes["pipeline"] * chance.choice((1, 2, 3))
    stages = sizes["pipeline"] * chunks
    vocabulary = {
        "vocab_size": chance.randint(17, 70),
        "make_vocab_size_divisible_by": chance.choice((1, 2, 4, 5)),
    }
    ours = {}
    if not whole_layers and schedule != "interlaced" and chance.random() < 0.4:
        vocabulary = {"vocab_size": ROWS - 1, "make_vocab_size_divisible_by": 4}
        ours["vocab_shards"] = ",".join(map(str, _random_rows(chance, sizes["pipeline"], 2 * sizes["tensor"])))
    job = RandomJob(
        schedule,
        whole_layers,
        sizes,
        options={
            "num_layers": stages * (1 if stages > 6 else chance.choice((1, 1, 2))),
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * microbatches * sizes["data"],
            **vocabulary,
            "seq_length": (length := chance.choice((32, 64, 128))),
            "max_position_embeddings": length,
            "train_iters": 4,
            "pipeline_model_parallel_size": sizes["pipeline"],
            "tensor_model_parallel_size": sizes["tensor"],
        },
        ours={
            "pipeline_schedule": schedule,
            "num_virtual_stages_per_pipeline_rank": chunks if schedule == "interleaved" else None,
            "vocab_parallel": not whole_layers,
            "vocab_parallel_algorithm": None if whole_layers else chance.choice(("vocab-1", "vocab-2")),
            **ours,
        },
        # A microbatch of one sequence would have no token left.
        masked=micro_batch > 1 and chance.random() < 0.3,
    )
    if sizes["context"] > 1:
        job.options.update(CONTEXT)
    for feature in FEATURES:
        if feature.fits(job) and chance.random() < feature.probability:
            job.options.update(feature.options)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("number", JOBS)
def test_every_step_equals_plain_megatron(number):
    job = random_job(number)
    plain = train(job.ranks, comparable_model(**job.options), masked=job.masked)
    found = train(job.ranks, comparable_model(**job.options, **job.ours), masked=job.masked)
    for step in (*plain.steps, *found.steps):
        step.gradients = {name: value for name, value in step.gradients.items() if not name.endswith(NO_GRADIENT)}
    assert_equal(found, plain, job.bound)
