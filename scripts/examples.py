"""Run commands and record their output, in the examples of `--help` and on the pages of the documentation.

    python scripts/examples.py [COMMAND|PAGE ...]     # such as plan, 'paper jobs', README.md; default: all (20 minutes)

A `console` fence on a page shows a command after `$ ` and, below it, the output of the command. A comment above the
fence may say which lines are kept, and how the test compares them:

    <!-- run: keep="times as fast|^use:" most=8 slow -->

`head=N` keeps the first N lines, `keep="PATTERN"` keeps the lines that contain the pattern, and `most=N` keeps at most
N matching lines; `...` stands for omitted lines. `status=N` is the expected exit status. `numbers` means that digits
differ from run to run. `slow` means that the command takes long or reads files that earlier blocks on the page wrote;
such a block is tested only with `-m slow`. `as="COMMAND"` runs another command instead, for example if the command
itself would set up an environment. The commands of a page run in order, in a new folder. A comment `<!-- file: NAME
-->` above any fence writes the content of the fence to the file NAME in that folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "megatron_vp" / "cli" / "examples"
WIDEST = 170
"""The number of characters to which lines are cut, so that most terminals show them in one or two lines."""


@dataclass(frozen=True)
class Example:
    """A command as a user would type it, and which lines of its output are kept."""

    words: str
    """The words after `megatron-vp`, or the whole command on a page."""
    keep: str = "."
    """A pattern that kept lines contain."""
    most: int = 8
    """The maximum number of lines that are kept; an ellipsis stands for all others."""
    status: int = 0
    """The exit status of the command."""
    before: str | None = ""
    """The words before `megatron-vp`, such as a launcher; None if `words` is the whole command."""
    head: int = 0
    """The number of first lines that are always kept."""
    slow: bool = False
    """Whether the command takes long, or reads what other commands wrote."""
    numbers: bool = False
    """Whether digits in the output differ from run to run."""
    runs: str | None = None
    """The command that runs instead; None if it is the command itself."""

    @property
    def command(self) -> str:
        """The command line as typed in a shell."""
        return self.words if self.before is None else f"{self.before}megatron-vp {self.words}"


RUN = (
    "--config quickstart --num-layers 4 --pipeline-model-parallel-size 2 --train-iters 6 --eval-iters 0 "
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
    "sbatch": Example(
        "sbatch llama3_8b --config data/mock --nodes 4 --vocab-parallel --dry-run --cpu", "^4 nodes|^the job|^sbatch"
    ),
    "tables": Example("tables", most=8),
    "paper jobs": Example("paper jobs -o cells", most=6),
    "paper collect": Example("paper collect cells", status=2),
}
"""The examples by command, in the order in which they run: later examples read files that earlier examples wrote."""


def path_of(command: str) -> Path:
    """The file in which the example of a command is kept."""
    return FOLDER / f"{command.replace(' ', '_')}.txt"


def shown(example: Example, printed: str) -> str:
    """Format the example and its output as the help and the pages show it."""
    printed = re.sub(r"/\S*/(?=\.venv/bin/)", "", printed)  # the path of this environment
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    kept = [number for number, line in enumerate(lines) if number >= example.head and re.search(example.keep, line)]
    kept = [*range(min(example.head, len(lines))), *kept[: example.most]]
    gaps = {number for number in kept if example.head and number - 1 not in (-1, *kept)}
    parts = [line for number in kept for line in [*["..."] * (number in gaps), lines[number]]]
    cut = [line if len(line) <= WIDEST else line[: WIDEST - 4].rstrip() + " ..." for line in parts]
    ends_early = kept[-1:] != [len(lines) - 1] if example.head else len(kept) < len(lines)
    command = "$ " + example.command.replace(" " + RUN, " --config quickstart")
    return "\n".join([command, *cut, *["..."] * ends_early]) + "\n"


def run(example: Example, folder: Path, *more: str) -> str:
    """Run the example in `folder`, and return its output, or its standard error if it has no other output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{ROOT / '.venv' / 'bin'}:{environment['PATH']}"
    command = ["bash", "-c", f"{example.runs or example.command} {shlex.join(more)}".rstrip()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != example.status:
        raise SystemExit(f"{command[-1]} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return (done.stdout or done.stderr).replace(f"{folder}/", "")


BLOCK = re.compile(r"(?:^<!-- run:(?P<options>.*?)-->\n)?^```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block of a page with a command and its output."""


@dataclass(frozen=True)
class Block:
    """A block of a page: its position, the command that it runs, and the output that it shows."""

    start: int
    end: int
    example: Example
    shown: str


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in order. Raises SystemExit if a block has no command or an unknown option."""
    for found in BLOCK.finditer(page):
        command = re.match(r"\$ ((?:.*\\\n)*.*)\n", found["text"])
        if command is None:
            raise SystemExit(f"a block shows no command after '$ ': {found['text']}")
        options: dict[str, object] = {"most": 12}
        for word in shlex.split(found["options"] or ""):
            name, given, value = word.partition("=")
            if name not in (*_TEXTS, *_NUMBERS, *_SWITCHES) or bool(given) == (name in _SWITCHES):
                raise SystemExit(f"{word} is not an option of a block; the block has {found['options']}")
            key = _TEXTS.get(name, name)
            options[key] = True if name in _SWITCHES else value if name in _TEXTS else int(value)
        yield Block(*found.span("text"), Example(command[1], before=None, **options), found["text"])  # type: ignore[arg-type]


_SWITCHES, _NUMBERS, _TEXTS = ("slow", "numbers"), ("head", "most", "status"), {"keep": "keep", "as": "runs"}


FILE = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
"""A file that a page shows and that its commands read."""


def alike(example: Example, fresh: str, kept: str) -> bool:
    """Whether two outputs are the same, apart from digits that differ from run to run."""

    def said(line: str) -> list[str]:
        line = re.sub(r"[-+]?\d[\d.,:e+-]*", "#", line)
        # The place at which a line is cut depends on the length of its numbers.
        return line.split()[:-3] if line.endswith(" ...") else line.split()

    if example.numbers:
        return list(map(said, fresh.splitlines())) == list(map(said, kept.splitlines()))
    return fresh == kept


def write_page(path: Path) -> None:
    """Run the commands of a page, and write their output into it."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, page)
        fresh = [(block, shown(block.example, run(block.example, folder))) for block in blocks_of(page)]
    for block, text in reversed(fresh):
        if not (block.example.numbers and alike(block.example, text, block.shown)):
            page = page[: block.start] + text + page[block.end :]
    path.write_text(page, encoding="utf-8")


def prepare(folder: Path, page: str = "") -> None:
    """Write what the examples read: a text, a configuration, the training script, and files that `page` shows."""
    for found in FILE.finditer(page):
        (folder / found["name"]).write_text(found["text"], encoding="utf-8")
    (folder / "texts").mkdir()
    (folder / "texts" / "licence.txt").write_text((ROOT / "LICENSE").read_text("utf-8") * 20, "utf-8")
    for name in ("scripts", "configs", "benchmarks", "evidence", "examples", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "pretrain_gpt_vp.py").write_text((ROOT / "pretrain_gpt_vp.py").read_text("utf-8"), "utf-8")


def train(folder: Path) -> None:
    """Train the two runs that `report` and `trace` read."""
    for name, flags in (("plain", []), ("vocab-2", ["--vocab-parallel", "--pipeline-trace", "trace"])):
        report = ["--rank-report", name, "--tensorboard-dir", f"{name}/tensorboard"]
        words = f"run pretrain_gpt_vp.py {RUN}"
        printed = run(Example(words, before=EXAMPLES["run"].before), folder, *report, *flags)
        (folder / name / "log.txt").write_text(printed, encoding="utf-8")


def pages() -> list[Path]:
    """The pages that show the output of commands."""
    found = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [path for path in found if "```console" in path.read_text(encoding="utf-8")]


def main() -> None:
    """Write all examples, or those of the named commands and pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND|PAGE", help="such as plan or README.md (default: all)")
    given = parser.parse_args().commands or [*EXAMPLES, *map(str, pages())]
    asked = [word for word in given if not word.endswith(".md")]
    for word in given:
        if word.endswith(".md"):
            print(word, flush=True)
            write_page(ROOT / word)
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
