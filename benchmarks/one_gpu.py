"""Train with several ranks over NCCL on one GPU, and compare the losses with plain Megatron's.

    python benchmarks/one_gpu.py [JOB...] [--ranks 2] [--seconds 50] [--output FILE.jsonl]

The jobs start from the same weights: plain Megatron, 1f1b with vocab-2, v-half with vocab-1, and the last with one
chunk per rank in the host's memory, which must not change a bit. A single job starts from its own weights, and only has
to end.

NCCL refuses two ranks of one host on one GPU, and recognizes a host by a hash. NCCL_HOSTID replaces this hash, so every
rank looks like a node with one GPU, and NCCL connects the ranks over sockets. The ranks take turns on the GPU, so times
mean nothing. Without a GPU, the same jobs run over gloo. The exit status is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from measuring import write

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()
LOSS = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: (\S+)")
TOLERANCE = 3e-3 if GPU else 1e-4
V_HALF = ["--vocab-parallel", "--pipeline-schedule", "v-half", "--vocab-parallel-algorithm", "vocab-1"]
JOBS = {
    "plain": [],
    "1f1b-vocab-2": ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-2"],
    "v-half-vocab-1": V_HALF,
    "v-half-offload": [*V_HALF, "--offload-chunks", "1"],
}
MODEL = ["--num-layers", "8", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
MODEL += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--no-create-attention-mask-in-dataloader"]
MODEL += ["--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "2e-4", "--lr-decay-style", "constant"]
MODEL += ["--attention-dropout", "0", "--hidden-dropout", "0", "--eval-interval", "100", "--eval-iters", "0"]
MODEL += ["--log-interval", "1"]
if GPU:
    MODEL += ["--hidden-size", "1024", "--num-attention-heads", "8", "--seq-length", "1024", "--bf16"]
    MODEL += ["--max-position-embeddings", "1024", "--vocab-size", "65536"]
else:
    MODEL += ["--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--cpu"]
    MODEL += ["--max-position-embeddings", "32", "--vocab-size", "500"]
ENVIRONMENT = {
    **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "2"},
    **{"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},
}


def run(flags: list[str], ranks: int, seconds: float, port: int, folder: Path) -> tuple[list[int | None], list[float]]:
    """Train for at most `seconds`; return the ranks' statuses (None if stopped at the limit) and the losses."""
    start, children, logs = time.monotonic(), [], [folder / f"{port}_{rank}.log" for rank in range(ranks)]
    words = [sys.executable, "pretrain_gpt_vp.py", *MODEL, "--pipeline-model-parallel-size", str(ranks), *flags]
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "NCCL_HOSTID": f"rank{rank}"}
            environment = os.environ | ENVIRONMENT | {name: str(value) for name, value in own.items()}
            with log.open("w") as file:
                children.append(
                    subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        while time.monotonic() - start < seconds and any(each.poll() is None for each in children):
            if any(each.poll() for each in children):
                seconds = min(seconds, time.monotonic() - start + 5)  # The watchdogs of the others say where they were.
            time.sleep(0.1)
    finally:
        found = [each.poll() for each in children]
        for end in ("terminate", "kill"):
            for each in children:
                getattr(each, end)()
            for each in children:
                with suppress(subprocess.TimeoutExpired):
                    each.wait(4)
    said = [log.read_text(errors="replace") for log in logs]
    print(*(text if status is not None else text + "\n(stopped)" for text, status in zip(said, found, strict=True)))
    return found, [float(loss) for text in said for _, loss in LOSS.findall(text)]


def main() -> int:
    """Train the jobs, and print a verdict for each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"some of {' '.join(JOBS)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=50, help="time limit of a job")
    parser.add_argument("--output", type=Path, help="append one line of JSON per job to this file")
    args = parser.parse_args()
    names, failed = args.jobs or list(JOBS), False
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"unknown job {unknown[0]}; jobs are {' '.join(JOBS)}")
    with tempfile.TemporaryDirectory() as folder:
        weights, port, losses = Path(folder) / "weights", 29610, {}
        jobs = {name: [*JOBS[name], "--train-iters", "3" if len(names) == 1 else "8"] for name in names}
        if len(names) > 1:
            start = ["--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng"]
            jobs = {name: [*flags, *start] for name, flags in jobs.items()}
            jobs = {
                "weights": ["--train-iters", "1", "--save", str(weights), "--save-interval", "1", "--no-save-optim"]
            } | jobs
        for name, flags in jobs.items():
            port, begun = port + 1, time.monotonic()
            status, losses[name] = run(flags, args.ranks, args.seconds, port, Path(folder))
            verdict = {"job": name, "ranks": args.ranks, "status": status, "seconds": round(time.monotonic() - begun)}
            verdict |= {"losses": losses[name], "torch": torch.__version__, "backend": "nccl" if GPU else "gloo"}
            right = status == [0] * args.ranks
            plain = losses.get("plain")
            if right and plain and name != "plain":
                verdict["from_plain"] = max(abs(own / its - 1) for own, its in zip(losses[name], plain, strict=True))
                right = verdict["from_plain"] <= TOLERANCE
            if right and name == "v-half-offload" and losses.get("v-half-vocab-1"):
                right = verdict["bits_without_offload"] = losses[name] == losses["v-half-vocab-1"]
            failed |= not right
            print(f"verdict: {name} {'ok' if right else 'FAILED'} {verdict}", flush=True)
            write(verdict, args.output)
            if not right and name in ("weights", "plain"):
                break  # There is nothing to compare the other jobs with.
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
