"""A job of the option survey, its runs under our schedules, and the Megatron options that it covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BOUND = 2e-5
WAYS = ("1f1b/vocab-2", "v-half/vocab-1", "zb-h1/none", "interleaved/vocab-2")
MANY_WAYS = (*WAYS, "zb-h1/vocab-2", "v-half/none", "interleaved/none")
FEWER_CHUNKS = ("1f1b/vocab-2", "v-half/vocab-1", "zb-h1/none")
TWO_WAYS = ("1f1b/vocab-2", "v-half/vocab-1")
"""For what happens outside of the schedule."""
ONE_CHUNK = ("1f1b/vocab-2", "zb-h1/none")
LOCAL_INIT = ("1f1b/vocab-2",)
HALF = 5e-3
"""Bound in 16 bits, whose rounding the runs share only in part."""

_TWO_CHUNKS = ("interleaved", "v-half", "v-min", "zb-v")

# What every job has, unless it says otherwise, with two layers per rank.
BASE: Mapping[str, object] = {
    "hidden_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 500,
    "make_vocab_size_divisible_by": 128,
    "train_iters": 5,
    "adam_eps": 1e-5,
    "eval_iters": 1,
    "eval_interval": 2,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "log_validation_ppl_to_tensorboard": True,
    "tensorboard_log_interval": 1,
}


@dataclass(frozen=True)
class Job:
    """Options of Megatron's, and how runs with them are compared.

    name: what the job is about, the row's title on the page.
    options: long argument names with underscores; `{data}` stands for a folder with the datasets a, b and c, `{folder}`
        for a folder of the run's own.
    ways: `schedule/algorithm`, `none` without --vocab-parallel.
    ranks, size: processes, and p of them in a pipeline.
    bound: largest relative distance of a logged number.
    why: the reason for other ways or another bound than those of most jobs.
    but: beginnings of the names of numbers that are not compared, for the reason that `why` gives.
    by_name: all weights are set by their names, as in jobs of two runs. Otherwise they are Megatron's own, and ways
        with several chunks per rank start from plain Megatron's checkpoint of iteration 2.
    plain: further options of plain Megatron's run.
    then: options of a second run, which loads what the first one saved to `{folder}/saved`.
    default: ways that run with the default tests, not only with `-m slow`.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    ways: tuple[str, ...] = WAYS
    ranks: int = 2
    size: int = 2
    bound: float = BOUND
    why: str = ""
    but: tuple[str, ...] = ()
    by_name: bool = False
    plain: Mapping[str, object] = field(default_factory=dict)
    then: Mapping[str, object] | None = None
    default: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        parts = (int(self.options.get(f"{kind}_parallel_size", 1)) for kind in ("tensor_model", "context"))
        return self.ranks // math.prod(parts, start=self.size)

    def starts_from_checkpoint(self, way: str) -> bool:
        """Whether the run in this way continues plain Megatron's run from its checkpoint."""
        return chunks(way) > 1 and not self.sets_weights

    @property
    def sets_weights(self) -> bool:
        """Whether all runs start from the same weights, set by their names."""
        return self.by_name or self.then is not None


def chunks(way: str) -> int:
    """Model chunks per rank."""
    return 2 if way.split("/")[0] in _TWO_CHUNKS else 1


def way_options(way: str, options: Mapping[str, object]) -> dict[str, object]:
    """What is added to a job's options to run it in this way."""
    schedule, algorithm = way.split("/")
    in_rounds = schedule == "interleaved" and not options.keys() & {
        "pipeline_model_parallel_layout",
        "hybrid_layer_pattern",
    }
    return {
        "pipeline_schedule": schedule,
        "vocab_parallel": algorithm != "none",
        "vocab_parallel_algorithm": None if algorithm == "none" else algorithm,
        "num_virtual_stages_per_pipeline_rank": 2 if in_rounds else None,
    }


def covered(jobs: Iterable[Job]) -> set[str]:
    """Names, with underscores, of Megatron's options that the jobs give."""
    given = {name for job in jobs for options in (BASE, job.options, job.then or {}) for name in options}
    return given - {"core_attention"}  # an option of ours
