"""Run every command once, small, and keep what it prints as the example of its `--help` (some minutes on two cores).

python scripts/help_examples.py [COMMAND ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "megatron_vp" / "cli" / "examples"
WIDEST = 170
"""Characters of a line that are kept: most terminals show them in one or two lines."""


@dataclass(frozen=True)
class Example:
    """A command as somebody would give it, and which lines of what it prints are kept."""

    words: str
    """behind `megatron-vp`"""
    keep: str = "."
    """a pattern that kept lines contain"""
    most: int = 8
    """lines that are kept; an ellipsis stands for others"""
    status: int = 0
    """that it ends with"""
    before: str = ""
    """what stands before `megatron-vp`, such as a launcher"""


RUN = (
    "--config quickstart.yaml --num-layers 4 --pipeline-model-parallel-size 2 --train-iters 6 --eval-iters 0 "
    "--tokenizer-model data/corpus_tokenizer --data-path data/corpus_text_document --split 1,0,0 --cpu"
)
EXAMPLES = {
    "schedule": Example("schedule v-half -p 4 -m 8 --vocab vocab-2", most=7),
    "plan": Example("plan llama3_8b --hardware h100 --nodes 4", "times as fast|^use:"),
    "simulate": Example("simulate llama3_8b --nodes 4 --vocab-parallel", "^schedule| s per iteration|^peak"),
    "data": Example("data texts/ --output data --vocab-size 512"),
    "env": Example("env"),
    "check": Example("check llama3_8b --config data/mock --ranks 32 --vocab-parallel --cpu", most=6),
    "patches": Example("patches --dry-run", "^[a-z].*:|fit", most=6),
    "flags": Example("flags", most=6),
    "run": Example(
        f"run pretrain_gpt_vp.py {RUN} --vocab-parallel",
        "rows by|layers by|iteration  ",
        4,
        before="torchrun --nproc-per-node 2 --no-python ",
    ),
    "replay": Example("replay gpt_4b --config data/mock --rank 7 --vocab-parallel --shapes-only --cpu", most=10),
    "trace": Example("trace trace/", most=10),
    "report": Example("report plain/ vocab-2/", most=12),
    "sbatch": Example("sbatch llama3_8b --config data/mock --nodes 4 --vocab-parallel --dry-run --cpu", most=6),
    "tables": Example("tables", most=8),
    "paper tables": Example("paper tables", most=8),
    "paper jobs": Example("paper jobs -o cells", most=6),
    "paper collect": Example("paper collect cells", status=2),
    "paper calibrate": Example("paper calibrate", most=8),
    "paper public": Example("paper public --only gpt3", most=10),
}
"""By command, in the order in which they run: later ones read what earlier ones wrote."""


def path_of(command: str) -> Path:
    """Where the example of a command is kept."""
    return FOLDER / f"{command.replace(' ', '_')}.txt"


def shown(example: Example, printed: str) -> str:
    """The example as the help shows it."""
    printed = re.sub(r"/\S*/(?=\.venv/bin/)", "", printed)  # where this environment is
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    kept = [line for line in lines if re.search(example.keep, line)]
    cut = [line if len(line) <= WIDEST else line[: WIDEST - 4].rstrip() + " ..." for line in kept[: example.most]]
    command = f"$ {example.before}megatron-vp {example.words}".replace(" " + RUN, " --config quickstart.yaml")
    return "\n".join([command, *cut, *["..."] * (len(cut) < len(lines))]) + "\n"


def run(example: Example, folder: Path, *more: str) -> str:
    """What the example prints in `folder`; on standard error only where it says nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words = [*example.before.split(), "megatron-vp", *example.words.split(), *more]
    words[words.index("megatron-vp")] = str(Path(sys.executable).parent / "megatron-vp")
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != example.status:
        raise SystemExit(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout or done.stderr


def prepare(folder: Path) -> None:
    """What the examples read: a text, the quick start's configuration and the training script."""
    (folder / "texts").mkdir()
    (folder / "texts" / "licence.txt").write_text((ROOT / "LICENSE").read_text("utf-8") * 20, "utf-8")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "quickstart.yaml").write_text((ROOT / "megatron_vp/configs/quickstart.yaml").read_text("utf-8"), "utf-8")
    (folder / "pretrain_gpt_vp.py").write_text((ROOT / "pretrain_gpt_vp.py").read_text("utf-8"), "utf-8")


def train(folder: Path) -> None:
    """The two runs that `report` and `trace` read."""
    for name, flags in (("plain", []), ("vocab-2", ["--vocab-parallel", "--pipeline-trace", "trace"])):
        report = ["--rank-report", name, "--tensorboard-dir", f"{name}/tensorboard"]
        words = f"run pretrain_gpt_vp.py {RUN}"
        printed = run(Example(words, before=EXAMPLES["run"].before), folder, *report, *flags)
        (folder / name / "log.txt").write_text(printed, encoding="utf-8")


def main() -> None:
    """Write all, or those of the named commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="such as plan or 'paper jobs' (default: all)")
    asked = parser.parse_args().commands or list(EXAMPLES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        needed = [
            *["data"] * bool({"run", "trace", "report"} & set(asked)),
            *["paper jobs"] * ("paper collect" in asked),
        ]
        for command in dict.fromkeys([*needed, *asked]):
            if command in ("trace", "report") and not (folder / "trace").exists():
                train(folder)
            path_of(command).write_text(shown(EXAMPLES[command], run(EXAMPLES[command], folder)), encoding="utf-8")
            print(path_of(command).read_text("utf-8"))


if __name__ == "__main__":
    main()
