"""Say which public models gain from this package: the best run with it against the best that Megatron itself supports.

    python evidence/who_gains.py [--models NAME,...] [--format markdown|json]

Each model trains in 16 bits on a usual number of GPUs and with a usual global batch. `megatron-vp plan --search` varies
all parallel sizes, the micro-batch size and recomputation for both sides, within the GPU's memory and within half of
it, with a budget of 60 simulations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.public_rows import PublicRow, read_models
from megatron_vp.cli.plan import answer_for
from megatron_vp.cli.planning import GIB, read_cluster
from megatron_vp.errors import UserError


class Case(NamedTuple):
    """A model of `data/models.csv`, and how it is trained; the parallel sizes only have to be possible."""

    model: str
    hardware: str
    gpus: int
    sequence: int
    batch: int
    tensor: int
    pipeline: int
    expert: int = 1
    without_mtp: bool = False

    @property
    def name(self) -> str:
        """The model's name in the table."""
        return self.model + ", without MTP" * self.without_mtp

    def flags(self) -> list[str]:
        """The job's Megatron options."""
        given = {"seq": self.sequence, "gbs": self.batch, "tp": self.tensor, "pp": self.pipeline, "ep": self.expert}
        same = {"mbs": 1, "cp": 1, "vp": 1, "options": "dp_overlap", "precision": "bf16", "cross_entropy": "te"}
        columns = dict.fromkeys(("layers", "layout", "etp", "source", "recompute"), "")
        row = PublicRow(
            columns | {key: str(value) for key, value in {**given, **same}.items()}, read_models()[self.model]
        )
        flags = row.flags()
        if self.without_mtp:
            place = flags.index("--mtp-num-layers")
            del flags[place : place + 2]
        return flags


CASES = (
    Case("llama3_8b", "h100", 32, 8192, 512, 1, 4),
    Case("gemma3_27b", "h100", 128, 8192, 512, 2, 4),
    Case("llama2_70b", "h100", 256, 4096, 1024, 4, 4),
    Case("llama3_70b", "h100", 256, 8192, 512, 4, 4),
    Case("gpt_oss_120b", "h100", 64, 4096, 1280, 1, 4, 8),
    Case("qwen3_235b_a22b", "h100", 256, 4096, 8192, 2, 8, 32),
    Case("deepseek_v3", "h100", 1024, 4096, 16384, 2, 8, 64, without_mtp=True),
    Case("deepseek_v3", "h100", 1024, 4096, 16384, 2, 8, 64),
)


def rows(cases: Sequence[Case], budget: int = 60) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for every case and memory limit within which the model can train.

    budget: as `--search-budget` of `plan`.
    """
    for case in cases:
        config, hardware, _, memory = read_cluster([], case.flags(), case.hardware, None, None)
        earlier = None
        for limit in (memory, memory / 2):
            try:
                answer = answer_for(config, hardware, case.gpus, limit, True, budget=budget, earlier=earlier)
            except UserError as error:
                print(f"{case.name} within {limit / GIB:.0f} GiB: {error}", file=sys.stderr)
                continue
            earlier, verdict = answer.search, answer.document()["verdict"]
            yield {
                "model": case.name,
                "gpus": case.gpus,
                "hardware": case.hardware,
                "limit_gib": limit / GIB,
                "without": verdict["rival"],
                "with": verdict["ours"],
                **{key: verdict[key] for key in ("speedup", "memory_saved_gib", "answer")},
            }


def _cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return "-"
    sizes = "x".join(str(run[name]) for name in ("tensor", "context", "pipeline", "expert"))
    numbers = f"{run['iteration_seconds']:.4g}, {run['peak_memory_bytes'] / GIB:.1f}"
    return f"{run['schedule']} {run['method']} {sizes}{', recomputed' * (run['recompute'] != 'none')}: {numbers}"


def to_markdown(found: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["| job, GPUs, GiB | best without: s, GiB | best with: s, GiB | speed-up |", "|---" * 4 + "|"]
    for row in found:
        job = f"{row['model']}, {row['gpus']} {row['hardware'].upper()}, {row['limit_gib']:.0f}"
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
        gain = speedup + f", {row['answer']}" * (row["answer"] != "faster")
        lines.append(f"| {job} | {_cell(row['without'])} | {_cell(row['with'])} | {gain} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Run the script with `words`, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="names of models, separated by commas; default: all")
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown")
    given = parser.parse_args(words)
    names = given.models.split(",") if given.models else [case.model for case in CASES]
    if unknown := {*names}.difference(case.model for case in CASES):
        parser.error(
            f"unknown models: {', '.join(sorted(unknown))}; use {', '.join({case.model: 0 for case in CASES})}"
        )
    found = [*rows([case for case in CASES if case.model in names])]
    print(json.dumps(found, indent=1) + "\n" if given.format == "json" else to_markdown(found), end="")


if __name__ == "__main__":
    main()
