"""Check on a node with eight GPUs whether jobs start, end and match plain Megatron, and measure how fast they are.

    benchmarks/on_node.sh FOLDER [STEP...]

The steps run in this order; `losses` must run before the steps after `nccl`, which start from its checkpoint:

    env       the software that a run would use on this machine
    losses    plain Megatron, 1f1b with vocab-2, v-half with vocab-1: the same losses from the same weights; with
              activations in the host's memory, the same bits
    nccl      communicators, streams and whole iterations over NCCL (tests/gpu/test_nccl.py)
    blocking  three iterations with CUDA_LAUNCH_BLOCKING=1
    timers    three iterations with --timing-log-level 2
    tensor    two tensor ranks per stage with CUDA_DEVICE_MAX_CONNECTIONS=1, compared with plain Megatron
    channels  1f1b with vocab-2, with other numbers of NCCL's channels per message between ranks, or no clusters
    start     the time that jobs take to their first iteration, with each of PyTorch's NCCL backends
    memory    the device memory of each rank outside of PyTorch's allocator

The step `losses` takes five minutes, all steps together fifteen. Every command has a time limit. FOLDER gets a log per
command, summary.txt, results.json, and send_this.tar.gz with all of these. The exit status is 1 if a verdict is FAILED.
Without eight GPUs, the same steps run on four CPU processes, at sizes that only show that the steps work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LOSS = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: (\S+)")
OURS = {
    "1f1b vocab-2": ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-2"],
    "v-half vocab-1": ["--vocab-parallel", "--pipeline-schedule", "v-half", "--vocab-parallel-algorithm", "vocab-1"],
}
SCRIPT = ("pretrain_gpt_vp.py",)
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The number of ranks, and a job of the right size for them."""

    ranks: int
    model: list[str]
    tolerance: float
    """The relative tolerance for losses, which rounding in the job's precision requires."""

    @property
    def on_gpus(self) -> bool:
        """Whether the steps run on GPUs, not as a rehearsal on CPUs."""
        return "--cpu" not in self.model


def machine() -> Machine:
    """Describe this machine: eight GPUs, or four CPU processes."""
    shared = ["--num-layers", "16", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
    shared += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--no-create-attention-mask-in-dataloader"]
    shared += ["--micro-batch-size", "1", "--lr", "2e-4", "--lr-decay-style", "constant", "--clip-grad", "1.0"]
    shared += ["--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"]
    shared += ["--eval-interval", "10", "--eval-iters", "1", "--log-interval", "1"]
    if torch.cuda.device_count() >= 8:
        sizes = ["--hidden-size", "2048", "--num-attention-heads", "16", "--seq-length", "2048", "--bf16"]
        sizes += ["--max-position-embeddings", "2048", "--vocab-size", "131072", "--global-batch-size", "32"]
        return Machine(8, shared + sizes, 3e-3)
    sizes = ["--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--cpu"]
    sizes += ["--max-position-embeddings", "32", "--vocab-size", "500", "--global-batch-size", "8"]
    return Machine(4, shared + sizes, 1e-4)


@dataclass
class Run:
    """The results of one job."""

    name: str
    status: int | None
    """The exit status; None if the job reached its time limit."""
    seconds: float
    to_first_iteration: float | None
    losses: dict[int, float]
    memory: list[dict[str, int]] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median milliseconds of an iteration."""
        return sorted(self.milliseconds)[len(self.milliseconds) // 2]


class Node:
    """Runs the steps, and writes down their results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = machine()
        self.failed = False
        self.results: dict[str, object] = {"torch": torch.__version__, "ranks": self.machine.ranks}

    def say(self, verdict: str, words: str) -> None:
        """Report a verdict: ok, FAILED, or a figure to look at."""
        self.failed |= verdict == "FAILED"
        line = f"{verdict:7} {words}"
        print(line, flush=True)
        with (self.folder / "summary.txt").open("a") as file:
            file.write(line + "\n")

    def command(self, name: str, words: list[str], limit: float, **environment: str) -> tuple[int | None, float, Path]:
        """Run a command; return its exit status (None after `limit` seconds), its duration, and the file with its
        output.
        """
        log = self.folder / f"{name.replace(' ', '_')}.log"
        start = time.monotonic()
        with log.open("w") as file:
            file.write(" ".join([*(f"{key}={value}" for key, value in environment.items()), *words]) + "\n")
            file.flush()
            process = subprocess.Popen(
                words, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun stops its ranks, whose watchdogs then say where they were
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
                status = None
        return status, time.monotonic() - start, log

    def train(
        self, name: str, flags: list[str], limit: float = 90, script: tuple[str, ...] = SCRIPT, **environment: str
    ) -> Run:
        """Run a training job on all ranks."""
        reports = self.folder / f"{name.replace(' ', '_')}_ranks"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(self.machine.ranks), *script, *self.machine.model]
        if "--pipeline-model-parallel-size" not in flags:
            flags = [*flags, "--pipeline-model-parallel-size", str(self.machine.ranks)]
        begun = time.time()
        status, seconds, log = self.command(name, [*words, *flags, "--rank-report", str(reports)], limit, **environment)
        said = log.read_text(errors="replace")
        found = [json.loads(path.read_text()) for path in sorted(reports.glob("rank_*.json"))]
        first = min((path.stat().st_mtime for path in reports.glob("rank_*.json")), default=None)
        times = found[0]["iteration_milliseconds"] if found else []
        return Run(
            name,
            status,
            round(seconds, 1),
            round(first - begun - sum(times) / 1e3, 1) if first else None,
            {int(number): float(loss) for number, loss in LOSS.findall(said)},
            [report["memory_bytes"] for report in found],
            times,
        )

    def ended(self, run: Run) -> bool:
        """Whether a job succeeded; if not, report it."""
        if run.status == 0:
            return True
        what = "hung until its limit" if run.status is None else f"ended with status {run.status}"
        self.say("FAILED", f"{run.name}: {what} after {run.seconds} s; see its log")
        return False

    def step(self, name: str) -> None:
        """Run one step."""
        self.results[name] = getattr(self, f"_{name}")()
        (self.folder / "results.json").write_text(json.dumps(self.results, indent=1, default=vars) + "\n")

    def _env(self) -> None:
        status, _, log = self.command("env", [sys.executable, "-m", "megatron_vp.cli.app", "env"], 60)
        self.say("ok" if status == 0 else "FAILED", f"env: see {log.name}")

    def _nccl(self) -> None:
        tests = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-rs", "-p", "no:cacheprovider"]
        status, seconds, log = self.command("nccl", [*tests, "tests/gpu/test_nccl.py"], 300)
        last = log.read_text(errors="replace").strip().splitlines()[-1]
        self.say("ok" if status == 0 else "FAILED", f"nccl: {last} ({seconds:.0f} s)")

    def _losses(self) -> list[Run]:
        weights = str(self.folder / "weights")
        made = self.train("first weights", ["--train-iters", "1", "--save", weights, "--save-interval", "1"], 120)
        if not self.ended(made):
            return [made]
        reference = self._from_weights("plain", [], ["--train-iters", "20"])
        runs = [made, reference]
        for name, flags in OURS.items() if self.ended(reference) else ():
            run = self._from_weights(name, flags, ["--train-iters", "20"])
            runs.append(run)
            if self.ended(run):
                self._compare(run, reference)
                self.say(
                    "figure", f"{name}: {run.median:.1f} ms per iteration, plain Megatron {reference.median:.1f} ms"
                )
        if len(runs) == 4 and runs[-1].status == 0:
            name, flags = "v-half offload", [*OURS["v-half vocab-1"], "--offload-chunks", "1"]
            offload, resident = self._from_weights(name, flags, ["--train-iters", "20"]), runs[-1]
            runs.append(offload)
            if self.ended(offload):
                same = bool(offload.losses) and offload.losses == resident.losses
                self.say(
                    "ok" if same else "FAILED",
                    f"{name}: losses {'equal to' if same else 'different from'} those without",
                )
                self.say("figure", f"{name}: {offload.median:.1f} ms per iteration, {resident.median:.1f} ms without")
        return runs

    def _from_weights(
        self, name: str, flags: list[str], more: list[str], script: tuple[str, ...] = SCRIPT, **environment: str
    ) -> Run:
        start = ["--load", str(self.folder / "weights"), "--finetune", "--no-load-optim", "--no-load-rng"]
        return self.train(name, [*flags, *start, *more], script=script, **environment)

    def _compare(self, run: Run, reference: Run) -> None:
        if run.losses.keys() != reference.losses.keys() or not run.losses:
            self.say("FAILED", f"{run.name}: {len(run.losses)} losses logged, plain Megatron {len(reference.losses)}")
            return
        distance = max(abs(run.losses[each] / loss - 1) for each, loss in reference.losses.items())
        verdict = "ok" if distance <= self.machine.tolerance else "FAILED"
        self.say(
            verdict,
            f"{run.name}: losses of {len(run.losses)} iterations within {distance:.1e} of plain Megatron's, "
            f"{self.machine.tolerance:.0e} allowed",
        )

    def _short(self, what: str, more: list[str], **environment: str) -> Iterator[Run]:
        for name, flags in OURS.items():
            run = self._from_weights(f"{what} {name}", flags, ["--train-iters", "3", *more], **environment)
            if self.ended(run):
                self.say("ok", f"{run.name}: ended after {run.seconds} s")
            yield run

    def _blocking(self) -> list[Run]:
        return list(self._short("blocking", [], CUDA_LAUNCH_BLOCKING="1"))

    def _timers(self) -> list[Run]:
        return list(self._short("timers", ["--timing-log-level", "2"]))

    def _tensor(self) -> list[Run]:
        sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", str(self.machine.ranks // 2)]
        sizes += ["--sequence-parallel", "--train-iters", "5"]
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        reference = self._from_weights("tensor plain", [], sizes, **environment)
        runs = [reference]
        if self.ended(reference):
            runs.append(self._from_weights("tensor 1f1b vocab-2", OURS["1f1b vocab-2"], sizes, **environment))
            if self.ended(runs[-1]):
                self._compare(runs[-1], reference)
        return runs

    def _channels(self) -> list[Run]:
        runs, flags = [], OURS["1f1b vocab-2"]
        # In one step, so that iteration times from the same minutes are compared.
        for channels in ("4", "4,1", "2", "1"):
            script = ("benchmarks/with_channels.py", channels, *SCRIPT)
            runs.append(self._from_weights(f"channels {channels}", flags, ["--train-iters", "10"], script))
            if self.ended(runs[-1]):
                self.say("figure", f"{runs[-1].name} for a message: {runs[-1].median:.1f} ms per iteration")
        return runs

    def _start(self) -> list[Run]:
        runs = []
        for name, flags in {"plain": [], **OURS}.items():
            for backend in ("1", "0") if self.machine.on_gpus else ("1",):
                run = self.train(f"start {name} nccl2={backend}", [*flags, "--train-iters", "1"], 90,
                                 TORCH_DIST_USE_NCCL2=backend)  # fmt: skip
                runs.append(run)
                if self.ended(run):
                    self.say("figure", f"{run.name}: {run.to_first_iteration} s to the first iteration")
        return runs

    def _memory(self) -> dict[str, list[float]]:
        found = {}
        for name in ("plain", *OURS):
            reports = self.folder / f"{name.replace(' ', '_')}_ranks"
            memory = [json.loads(path.read_text())["memory_bytes"] for path in sorted(reports.glob("rank_*.json"))]
            found[name] = [round(each["outside"] / GIB, 2) for each in memory if "outside" in each]
            if found[name]:
                self.say("figure", f"{name}: GiB outside PyTorch's allocator, rank by rank: {found[name]}")
            elif self.machine.on_gpus:
                self.say("FAILED", f"{name}: no rank report of the step `losses`")
        return found


STEPS = ("env", "losses", "nccl", "blocking", "timers", "tensor", "channels", "start", "memory")


def main() -> None:
    """Run the steps, and pack their results."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=f"steps: {' '.join(STEPS)} (default: all)"
    )
    parser.add_argument("folder", type=Path, help="where logs and results go")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="some of the steps")
    options = parser.parse_args()
    unknown = [name for name in options.steps if name not in STEPS]
    if unknown:
        parser.error(f"unknown step {unknown[0]}; steps are {', '.join(STEPS)}")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    node = Node(folder)
    if not node.machine.on_gpus:
        node.say("figure", "fewer than eight CUDA devices: a rehearsal on four CPU processes, whose times mean nothing")
    for name in options.steps or STEPS:
        node.step(name)
    with tarfile.open(folder / "send_this.tar.gz", "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.name not in ("weights", "send_this.tar.gz"):
                archive.add(path, path.name)
    print(f"send us {folder / 'send_this.tar.gz'}")
    sys.exit(node.failed)


if __name__ == "__main__":
    main()
