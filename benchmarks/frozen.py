"""Freeze what a rewrite must not change, and compare a later state with it.

    python benchmarks/frozen.py [programs|jobs|checks ...] [--write]

programs    the programs of every schedule family, with each of its vocabulary methods, for up to 8 ranks and 16
            microbatches, with and without offloaded chunks, as digests
jobs        everything that `simulate --format json` prints for jobs of all kinds; numbers are compared to 1e-9
checks      the flags, parts and exit status (not the wording) of `check` for the shipped configurations

Without --write, the script prints every difference and exits with status 1 if there is one. With --write, it replaces
the tables in benchmarks/results/frozen. All three take about five minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import FAMILIES, VocabMethod, generate, lower, programs_to_json

FOLDER = Path(__file__).parent / "results" / "frozen"
SIZES = ((2, 2), (2, 7), (3, 8), (4, 4), (4, 16), (5, 11), (6, 13), (8, 16))
"""Pairs of pipeline ranks and microbatches, with fewer microbatches than ranks too, and numbers that do not divide."""

H100 = "--nodes 4"
JOBS = (
    *(f"{model} {H100}" for model in ("llama3_8b", "gemma2_9b", "qwen3_8b", "llama3_8b_hybrid", "moonlight_16b")),
    *(
        f"llama3_8b {H100} --vocab-parallel --pipeline-schedule {name}"
        for name in (
            "1f1b",
            "zb-h1",
            "zb-v",
            "v-half",
            "v-min",
            "dualpipe-v",
            "gis --num-virtual-stages-per-pipeline-rank 4",
            "interlaced",
        )
    ),
    f"llama3_8b {H100} --vocab-parallel --vocab-parallel-algorithm vocab-1",
    f"llama3_8b {H100} --vocab-parallel --vocab-shards even --pipeline-model-parallel-layout Et*5|(t*4|)*6t*3L",
    f"llama3_8b {H100} --vocab-parallel --num-layers 30",
    f"llama3_8b {H100} --vocab-parallel --pipeline-schedule v-half --offload-chunks 1",
    f"llama3_8b {H100} --vocab-parallel --pipeline-schedule v-flex --activation-limit 20GiB",
    f"llama3_8b {H100} --vocab-parallel --num-virtual-stages-per-pipeline-rank 2",
    f"llama3_8b {H100} --tensor-model-parallel-size 2 --sequence-parallel --vocab-parallel",
    f"llama3_8b {H100} --context-parallel-size 2 --vocab-parallel",
    f"llama3_8b {H100} --vocab-parallel --fp8-format hybrid --fp8-recipe tensorwise",
    f"llama3_8b {H100} --vocab-parallel --fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather",
    f"llama3_8b {H100} --vocab-parallel --recompute-granularity selective --recompute-modules core_attn mlp",
    f"llama3_8b {H100} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    f"llama3_8b {H100} --transformer-impl local --vocab-parallel",
    f"llama3_8b {H100} --mtp-num-layers 1 --vocab-parallel",
    f"llama3_8b {H100} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    f"llama3_8b {H100} --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer",
    f"gemma2_9b {H100} --vocab-parallel",
    f"qwen3_8b {H100} --vocab-parallel --hardware b200",
    f"llama3_8b_hybrid {H100} --vocab-parallel",
    f"moonlight_16b {H100} --vocab-parallel",
    f"moonlight_16b {H100} --vocab-parallel --moe-token-dispatcher-type flex",
    "llama3_70b --nodes 8 --vocab-parallel",
    "gpt_21b --nodes 4 --hardware a100 --vocab-parallel",
)
CONFIGS = ("gemma2_9b", "llama3_70b", "llama3_8b", "llama3_8b_hybrid", "moonlight_16b", "qwen3_8b")


def programs() -> Iterator[tuple[str, Any]]:
    """A digest of the programs of every schedule that a family can generate; the reason where it refuses one."""
    for name, family in FAMILIES.items():
        for method in family.methods:
            for ranks, microbatches in SIZES:
                for chunks in (2, 3) if family.chunks is None else (None,):
                    for offloaded in (0, 1):
                        words = f"{name} {method} p={ranks} m={microbatches} chunks={chunks} offload={offloaded}"
                        yield words, _digest(name, ranks, microbatches, method, chunks, offloaded)


def _digest(name: str, ranks: int, microbatches: int, method: VocabMethod, chunks: int | None, offloaded: int) -> str:
    limit = 0.75 * ranks if FAMILIES[name].limit is not None else None
    try:
        found = generate(
            name, ranks, microbatches, vocab=method, chunks=chunks, offload_chunks=offloaded, activation_limit=limit
        )
        return hashlib.sha256(programs_to_json(found, lower(found)).encode()).hexdigest()[:16]
    except UserError:
        return "refused"


def jobs() -> Iterator[tuple[str, Any]]:
    """What `simulate` prints for each of JOBS."""
    for words in JOBS:
        done = CliRunner().invoke(app, ["simulate", *words.split(), "--format", "json"])
        yield words, json.loads(done.stdout) if done.exit_code == 0 else str(done.exception)


def checks() -> Iterator[tuple[str, Any]]:
    """What `check` decides for the shipped configurations, plain and vocabulary parallel, on CPUs and on GPU nodes."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # What tensor parallelism needs.
    for config in CONFIGS:
        for ours in ("", "--vocab-parallel", "--vocab-parallel --pipeline-schedule v-half"):
            for where in ("--cpu", "--nodes te=2.17.1,apex=no"):
                words = f"{config} --config data/mock --ranks 64 {ours} {where}"
                done = CliRunner().invoke(app, ["check", *words.split(), "--format", "json"])
                yield words, json.loads(done.stdout) if done.exit_code == 0 else "refused"


TABLES = {"programs": programs, "jobs": jobs, "checks": checks}


def differences(before: Any, now: Any, where: str) -> Iterator[str]:
    """Describe every place in which two JSON values differ; numbers may differ by 1e-9 of their size."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{where}: {key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(before, float) and isinstance(now, float) and math.isclose(before, now, rel_tol=1e-9):
        return
    elif before != now:
        yield f"{where}: {before} -> {now}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="programs|jobs|checks", help="default: all")
    parser.add_argument("--write", action="store_true", help="replace the frozen tables")
    given = parser.parse_args()
    wrong = {*given.tables} - {*TABLES}
    if wrong:
        parser.error(f"{', '.join(sorted(wrong))} is not one of {', '.join(TABLES)}")
    found = 0
    for name in given.tables or TABLES:
        path, now = FOLDER / f"{name}.json", dict(TABLES[name]())
        if given.write:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(json.dumps(now, indent=0, sort_keys=True) + "\n", encoding="utf-8")
            continue
        lines = [*differences(json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(now)), name)]
        print(f"{name}: {len(now)} entries, {len(lines)} differences", *lines, sep="\n")
        found += len(lines)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
