"""Reads the memory and the compute time of every pipeline rank, from the files of --rank-report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_vp.trace.rank_files import read_ranks

SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "seq_length"),
    *("micro_batch_size", "context_parallel_size", "tensor_model_parallel_size", "padded_vocab_size"),
)
"""Names of the Megatron arguments on which pass times depend."""


@dataclass(frozen=True)
class RankReport:
    """The report of one pipeline rank, without the first (warm-up) iteration unless the run has only one.

    microbatches: number of microbatches in each iteration.
    iterations: seconds that each iteration's forward and backward passes took, including waiting.
    passes: the part of these seconds in which the rank computed, by kind of pass.
    peak_memory_bytes: largest number of bytes allocated at once; None if not measured (on CPU).
    sizes: the values of SIZES.
    layers, vocab_rows: of the run's virtual stages, and of its pipeline ranks; None if equal, and if not split.
    """

    rank: int
    pipeline_size: int
    parameters: int
    microbatches: tuple[int, ...]
    peak_microbatches_in_flight: float
    iterations: tuple[float, ...]
    passes: tuple[Mapping[str, float], ...]
    peak_memory_bytes: int | None
    run: str
    sizes: Mapping[str, int]
    schedule: str = ""
    vocab: str = "none"
    log_interval: int = 1
    layers: tuple[int, ...] | None = None
    vocab_rows: tuple[int, ...] | None = None

    @property
    def iteration_seconds(self) -> float:
        """Mean time of an iteration."""
        return fmean(self.iterations)

    @property
    def busy_seconds(self) -> float:
        """Mean computing time of the rank per iteration."""
        return fmean(sum(each.values()) for each in self.passes)

    @property
    def waiting_seconds(self) -> float:
        """Mean idle time of the rank per iteration; on a CPU, idle time includes waiting for a core."""
        return max(0.0, self.iteration_seconds - self.busy_seconds)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> RankReport:
        """Read a report from a file's JSON object."""
        names = ("iteration_milliseconds", "pass_milliseconds_by_iteration", "microbatches_by_iteration")
        rows = list(zip(*map(document.__getitem__, names), strict=True))
        times = [each for took, passes, _ in rows for each in (took, *passes.values())]
        counts = [int(count) for _, _, count in rows]
        if min(counts, default=0) < 1 or not all(0 <= each < math.inf for each in times):
            raise ValueError("impossible times or numbers of microbatches")
        took, passes, microbatches = zip(*(rows[1:] or rows), strict=True)  # The first iteration is for warm-up.
        peak = document["memory_bytes"].get("peak")
        return cls(
            rank=int(document["pipeline_rank"]),
            pipeline_size=int(document["pipeline_size"]),
            parameters=int(document["parameters"]),
            microbatches=tuple(map(int, microbatches)),
            peak_microbatches_in_flight=float(document["peak_microbatches_in_flight"]),
            iterations=tuple(each / 1e3 for each in took),
            passes=tuple({kind: each / 1e3 for kind, each in own.items()} for own in passes),
            peak_memory_bytes=None if peak is None else int(peak),
            run=str(document["run"]),
            sizes=dict(document.get("sizes", {})),
            schedule=str(document["schedule"]),
            vocab=str(document["vocab"]),
            log_interval=int(document.get("log_interval", 1)),
            layers=_counts(document.get("layers")),
            vocab_rows=_counts(document.get("vocab_rows")),
        )


def _counts(given: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(map(int, given))


def read_reports(folder: Path) -> list[RankReport]:
    """Read the reports of all pipeline ranks of the run in `folder`, in the order of ranks. Raises UserError."""
    return read_ranks(folder, RankReport.of, "--rank-report")
