"""Compare the memory that `simulate` predicts with the memory that `replay --shapes-only` counts, for realistic jobs.

    python benchmarks/memory_agrees.py [--jobs TEXT;TEXT;...] [--output FILE.jsonl]
    python benchmarks/memory_agrees.py --counted FILE.jsonl [...]
    python benchmarks/memory_agrees.py --table FILE.jsonl

The replay runs the real program of a rank on fake tensors, and does not use the cost model. Every line has the bytes of
tensors at a rank's peak, counted and predicted; the prediction leaves out workspaces and memory outside of tensors. The
exit status is 1 if the two differ by more than MEAN on average or by more than MOST at worst.

--jobs selects the jobs whose names contain one of the texts. --counted reads counts from a file and only predicts
again, after a change of the cost model. --table prints the lines of a file as a table for the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests.harness.ranks import RankError, run_ranks  # noqa: E402

GIB = 2**30

MEAN, MOST = 0.03, 0.08
"""How far the two may differ: on average, and for any rank of any job."""

LAYERS = {
    "TE": [],
    "sdpa": ["--core-attention", "sdpa"],
    "local": ["--transformer-impl", "local"],
}
METHODS = {
    "plain": [],
    "vocab-1": ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-1"],
    "vocab-2": ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-2"],
}
FURTHER = {
    "": [],
    "recomputed": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "context 2": ["--context-parallel-size", "2"],
    "tensor 2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "tensor 2, whole sequences": ["--tensor-model-parallel-size", "2"],
    "dropout": ["--hidden-dropout", "0.1"],
    "fp16": [],
    "vocabulary 256k": ["--vocab-size", "262144"],
    "fused cross entropy": ["--cross-entropy-loss-fusion"],
    "half of the rows on the last rank": ["--vocab-shards", ",".join(["9216"] * 7 + ["66560"])],
}
SETTINGS = {
    "gemma2_9b": "kernels: {window_size: null, window_attn_skip_freq: null}\nmodel: {apply_layernorm_1p: null}\n",
    "fp16": "precision: {bf16: false, fp16: true}\n",
}
"""Configuration overlays that unset what no flag can unset, such as sliding windows and zero-centered norm weights,
which need Transformer Engine's layers.
"""
GEMMA_V = ["--pipeline-model-parallel-layout", "Et*3|(t*3|)*9(t*2|)*5t*2L"]
"""A layout of 42 layers on the two chunks of 8 ranks."""


@dataclass(frozen=True)
class AgreesJob:
    """A job: a configuration, an implementation of layers, a schedule, a vocabulary method, and one more choice."""

    model: str
    layers: str
    schedule: str
    method: str
    further: str = ""

    @property
    def name(self) -> str:
        """The name of the job, in one line."""
        return ", ".join(filter(None, (self.model, self.layers, self.schedule, self.method, self.further)))

    def files(self, folder: Path) -> list[str]:
        """The configuration files of the job; overlays are written to `folder`."""
        files = [str(ROOT / "configs" / f"{self.model}.yaml")]
        for each in (self.model, self.further):
            if each in SETTINGS and not (each == self.model and self.layers == "TE"):
                overlay = folder / f"{each}.yaml"
                overlay.write_text(SETTINGS[each])
                files.append(str(overlay))
        return files

    @cached_property
    def flags(self) -> list[str]:
        """The flags of the job. Three microbatches per pipeline rank are enough to reach the peak."""
        flags = ["--pipeline-schedule", self.schedule, *LAYERS[self.layers], *METHODS[self.method]]
        flags += GEMMA_V if self.model == "gemma2_9b" and self.schedule != "1f1b" else []
        flags += ["--num-virtual-stages-per-pipeline-rank", "2"] if self.schedule == "interleaved" else []
        return [*flags, "--global-batch-size", "24", *FURTHER[self.further]]


TWENTY = [
    AgreesJob("llama3_8b", "TE", "1f1b", "plain"),
    AgreesJob("llama3_8b", "TE", "v-half", "plain"),
    AgreesJob("llama3_8b", "TE", "v-half", "vocab-1"),
    AgreesJob("llama3_8b", "sdpa", "1f1b", "vocab-2"),
    AgreesJob("llama3_8b", "local", "v-half", "vocab-2"),
    AgreesJob("llama3_8b", "local", "1f1b", "plain"),
    AgreesJob("qwen3_8b", "TE", "1f1b", "vocab-2"),
    AgreesJob("qwen3_8b", "TE", "v-half", "plain"),
    AgreesJob("qwen3_8b", "TE", "v-half", "vocab-2"),
    AgreesJob("qwen3_8b", "sdpa", "1f1b", "plain"),
    AgreesJob("qwen3_8b", "sdpa", "v-half", "vocab-1"),
    AgreesJob("gemma2_9b", "TE", "1f1b", "plain"),
    AgreesJob("gemma2_9b", "TE", "1f1b", "vocab-2"),
    AgreesJob("gemma2_9b", "TE", "v-half", "vocab-2"),
    AgreesJob("gemma2_9b", "sdpa", "v-half", "vocab-1"),
    AgreesJob("gpt_4b", "TE", "1f1b", "plain"),
    AgreesJob("gpt_4b", "TE", "v-half", "plain"),
    AgreesJob("gpt_4b", "TE", "v-half", "vocab-1"),
    AgreesJob("gpt_4b", "sdpa", "1f1b", "vocab-1"),
    AgreesJob("gpt_4b", "sdpa", "v-half", "plain"),
]
"""Twenty jobs: Llama-like, Qwen-like, Gemma-like and GPT; fused and local layers; 1F1B and V-Half."""

JOBS = [
    *TWENTY,
    AgreesJob("llama3_8b", "TE", "zb-v", "vocab-2"),
    AgreesJob("llama3_8b", "TE", "zb-h1", "vocab-2"),
    AgreesJob("llama3_8b", "TE", "v-min", "vocab-2"),
    AgreesJob("llama3_8b", "TE", "interleaved", "vocab-2"),
    AgreesJob("llama3_8b", "TE", "dualpipe-v", "vocab-2"),
    AgreesJob("llama3_8b", "TE", "1f1b", "vocab-2", "context 2"),
    AgreesJob("llama3_8b", "sdpa", "1f1b", "plain", "context 2"),
    AgreesJob("llama3_8b", "TE", "v-half", "vocab-2", "tensor 2"),
    AgreesJob("llama3_8b", "TE", "1f1b", "vocab-1", "tensor 2, whole sequences"),
    AgreesJob("llama3_8b", "TE", "1f1b", "plain", "recomputed"),
    AgreesJob("qwen3_8b", "TE", "v-half", "vocab-2", "recomputed"),
    AgreesJob("gpt_4b", "TE", "1f1b", "vocab-2", "dropout"),
    AgreesJob("gpt_4b", "TE", "1f1b", "plain", "vocabulary 256k"),
    AgreesJob("gpt_4b", "TE", "v-half", "plain", "vocabulary 256k"),
    AgreesJob("gpt_4b", "TE", "1f1b", "plain", "fused cross entropy"),
    AgreesJob("gpt_4b", "sdpa", "1f1b", "vocab-2", "fp16"),
    AgreesJob("gpt_4b", "TE", "1f1b", "vocab-1", "half of the rows on the last rank"),
    AgreesJob("gpt_4b", "TE", "1f1b", "vocab-2", "half of the rows on the last rank"),
    AgreesJob("gpt_4b", "TE", "v-half", "vocab-2", "half of the rows on the last rank"),
    AgreesJob("gpt_4b", "TE", "zb-h1", "vocab-1", "half of the rows on the last rank"),
]
"""All jobs, including further schedules, sizes and options that change memory."""

PLACES = ("first", "middle", "last")
"""The pipeline ranks that are compared."""


def predicted(job: AgreesJob) -> list[float]:
    """The bytes of tensors that the cost model predicts for the peak of every pipeline rank."""
    from megatron_vp.cost.hardware.gpus import HARDWARE
    from megatron_vp.cost.layers.job_plan import plan_of
    from megatron_vp.cost.layers.job_sizes import job_of
    from megatron_vp.cost.planning.own_plan import with_shards
    from megatron_vp.cost.planning.predict import predict
    from megatron_vp.cost.ranks.rank_memory import WORKSPACES
    from megatron_vp.jobs.job_config import read_sizes

    with tempfile.TemporaryDirectory() as folder:
        read = read_sizes(job.files(Path(folder)), job.flags)
    job, hardware = job_of(read), HARDWARE["h100"]
    plan = with_shards(read, plan_of(read), job, hardware, memory_limit=hardware.memory)
    found = predict(job, plan, hardware)
    return [memory.allocated - WORKSPACES for memory in found.memory]


def counted(job: AgreesJob, rank: int) -> dict[str, Any]:
    """The report of a replay of shapes for one pipeline rank, in a separate process, because caches would keep fake
    tensors.
    """
    try:
        return run_ranks(1, replay, job, rank, timeout=600)[0]
    except RankError as error:
        return {"error": str(error).strip().splitlines()[-1]}


def replay(_rank: int, _world_size: int, job: AgreesJob, rank: int) -> dict[str, Any]:
    """Replay one pipeline rank in this process."""
    from megatron_vp.jobs.job_config import parallel_sizes, read_sizes
    from megatron_vp.mcore.replay.one_rank import run_alone

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        files = job.files(Path(folder))
        sizes = read_sizes(files, job.flags)
        beside = math.prod(parallel_sizes(sizes)[1:])
        return asdict(run_alone("pretrain_gpt_vp.py", files, rank * beside, None, 1, job.flags, shapes_only=True))


def agreement(job: AgreesJob, place: str, earlier: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Count and predict bytes for the `first`, `middle` or `last` pipeline rank; reuse counts in `earlier` lines."""
    found = predicted(job)
    rank = {"first": 0, "middle": len(found) // 2, "last": len(found) - 1}[place]
    line = {"job": job.name, "place": place, "rank": rank}
    peak = earlier.get((job.name, place), {}).get("counted_bytes")
    if peak is None:
        report = counted(job, rank)
        if "error" in report:
            return line | report
        peak = report["memory_bytes"]["peak"]
    off = round(found[rank] / peak - 1, 4)
    return line | {"counted_bytes": peak, "predicted_bytes": round(found[rank]), "off": off}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Read the lines of JSON in a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def table_of(lines: list[dict[str, Any]]) -> str:
    """A table with a row per job, GiB counted and predicted for each of its ranks, and how far the two differ."""
    rows: dict[str, list[str]] = {}
    for line in lines:
        cells = ["failed", line["error"]] if "error" in line else [
            f"{line['counted_bytes'] / GIB:.2f}",
            f"{line['predicted_bytes'] / GIB:.2f} ({100 * line['off']:+.1f} %)",
        ]  # fmt: skip
        rows.setdefault(line["job"], []).extend(cells)
    heads = [f"{place}: counted | predicted" for place in ("first rank", "middle", "last")]
    text = [f"| job | {' | '.join(heads)} |", "|---" * 7 + "|"]
    text += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    off = [abs(line["off"]) for line in lines if "error" not in line]
    if off:
        text.append(
            f"\nThe mean difference over {len(off)} ranks is {100 * statistics.mean(off):.2f} %, and the largest "
            f"{100 * max(off):.1f} %."
        )
    return "\n".join(text)


def main() -> int:
    """Compare all jobs, and print or append to a file one line of JSON per rank. Returns 1 if they do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="", help="only jobs whose names contain one of these texts (separator: ;)")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--counted", type=Path, help="read counts from this file instead of counting")
    parser.add_argument("--table", type=Path, help="only print the lines of this file as a table")
    args = parser.parse_args()
    if args.table is not None:
        print(table_of(lines_of(args.table)))
        return 0
    from measuring import write

    chosen = [job for job in JOBS if any(text in job.name for text in args.jobs.split(";"))]
    places = [(job, place) for job in chosen for place in PLACES]
    lines = []
    earlier = {} if args.counted is None else {(line["job"], line["place"]): line for line in lines_of(args.counted)}
    for job, place in places:
        line = agreement(job, place, earlier)
        write(line | {name: version(name) for name in ("torch", "megatron-core")}, args.output)
        lines.append(line)
    print(table_of(lines), file=sys.stderr)
    off = [abs(line["off"]) if "error" not in line else float("inf") for line in lines]
    return int(statistics.mean(off) > MEAN or max(off) > MOST)


if __name__ == "__main__":
    import memory_agrees  # so that the ranks' processes can import it

    sys.exit(memory_agrees.main())
