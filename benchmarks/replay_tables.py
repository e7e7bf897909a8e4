"""Measure time and memory of single ranks of the paper's models, each replayed alone on one GPU or without one.

    python benchmarks/replay_tables.py [--models gpt_4b,gpt_10b,gpt_21b] [--ranks 0,-1] [--output FILE.jsonl]
    python benchmarks/replay_tables.py --shapes-only [...]

Every line is one rank of one job: pass times, peak memory and its parts, as `megatron-vp replay` reports them. In a
plain job, the first and last rank hold the vocabulary layers; with vocabulary parallelism, all ranks hold the same, and
differ only in microbatches in flight. Without Transformer Engine, attention is PyTorch's (`--core-attention sdpa`). If
a rank fails or takes longer than --timeout, its line has the error, and the exit status is 1. With --shapes-only,
nothing is computed and only memory is found, in seconds on a CPU, with 3 p microbatches, which are enough to reach the
peak; `predicted_bytes` is the cost model's prediction for that rank, without memory outside of tensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import product
from pathlib import Path

from measuring import write

from megatron_vp.cost.ranks.rank_memory import WORKSPACES

ROOT = Path(__file__).resolve().parents[1]
METHODS = {
    "baseline": [],
    "vocab-1": ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-1"],
    "vocab-2": ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-2"],
    "v-half baseline": ["--pipeline-schedule", "v-half"],
    "v-half vocab-1": [
        *("--pipeline-schedule", "v-half", "--vocab-parallel", "--vocab-parallel-algorithm", "vocab-1"),
    ],
}
METHODS["v-half offload"] = [*METHODS["v-half vocab-1"], "--offload-chunks", "1"]
SIZES = {"gpt_4b": 8, "gpt_10b": 16, "gpt_21b": 32, "gpt_7b": 16, "gpt_16b": 24, "gpt_30b": 32}
ATTENTION = [] if importlib.util.find_spec("transformer_engine") else ["--core-attention", "sdpa"]


def replay(config: Path, rank: int, flags: list[str], timeout: float) -> dict:
    """Replay one rank in a separate process; return its report or, if it fails, the last line that it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "megatron_vp.cli.app", "replay", str(config), "--rank", str(rank)]
        try:
            done = subprocess.run(
                [*command, "-o", str(report), *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as expired:
            said, reason = (expired.stderr or b"").decode(errors="replace"), f"not done after {timeout:g} s"
        else:
            if not done.returncode:
                return json.loads(report.read_text())
            said = done.stderr
            reason = (said.strip().splitlines() or ["no message"])[-1]
        print(said[-4000:], file=sys.stderr, flush=True)
        return {"error": reason}


def predicted_bytes(config: Path, rank: int, flags: list[str]) -> float:
    """The peak of a rank's tensors in the cost model, without memory outside of the allocator and workspaces of
    libraries.
    """
    command = [sys.executable, "-m", "megatron_vp.cli.app", "simulate", str(config), "--hardware", "h100", *flags]
    said = subprocess.run([*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = json.loads(said)["plan"]["memory_bytes"][rank]
    return sum(value for name, value in parts.items() if name != "outside") - WORKSPACES


def main() -> int:
    """Replay every combination, and print or append to a file one line of JSON for each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt_4b,gpt_10b,gpt_21b", help="names of files in configs/")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--vocab-sizes", default="32768,262144")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--ranks", default="0,-1", help="pipeline ranks; negative ones count from the end")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a rank")
    parser.add_argument("--shapes-only", action="store_true", help="count only memory, without a GPU")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the job")
    args = parser.parse_args()
    only_shapes = ["--shapes-only", "--iterations", "1"] if args.shapes_only else []
    rows = product(args.models.split(","), args.vocab_sizes.split(","), args.methods.split(","), args.ranks.split(","))
    status = 0
    for model, vocab_size, method, place in rows:
        config, size = ROOT / "configs" / f"{model}.yaml", SIZES[model]
        rank = int(place) % size
        flags = [*METHODS[method], "--seq-length", str(args.sequence), "--vocab-size", vocab_size]
        flags += ["--max-position-embeddings", str(args.sequence), *ATTENTION]
        flags += ["--global-batch-size", str(3 * size)] if args.shapes_only else []
        flags += args.flags
        found = replay(config, rank, [*flags, *only_shapes], args.timeout)
        if args.shapes_only and "error" not in found:
            found["predicted_bytes"] = predicted_bytes(config, rank, flags)
        line = {"model": model, "vocab_size": int(vocab_size), "method": method, "rank": rank} | found
        write(line | {name: version(name) for name in ("torch", "megatron-core")}, args.output)
        status |= "error" in found
    return status


if __name__ == "__main__":
    sys.exit(main())
