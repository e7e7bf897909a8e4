"""Find out which tests notice which faults: 300 mutants, each a named fault that is put into a copy of the sources.

    python benchmarks/mutants.py --check
    python benchmarks/mutants.py --map [tests/schedule tests/vocab ...]
    python benchmarks/mutants.py [--room lowering ...] [--only TEXT] [--jobs 2] [--seconds 20] [--again]

Before code is deleted or rewritten, all mutants run once; afterwards, those of the rooms that have changed run again.
No mutant that was noticed before may go unnoticed. If a mutant's code is gone, write the same fault for the code that
replaced it. Each file of `mutants/` describes the faults of a room:

    @ megatron_vp/runtime/store.py          the file of the mutants that follow
    the peak is the lowest count            a mutant's name
    -self.peak = max(self.peak, self.now)   the text to replace, which occurs once in the file (one or more lines)
    +self.peak = min(self.peak, self.now)   its replacement (any number of lines)

`--check` verifies, in a second, that every text still occurs once and that the replacement is different, valid Python.

`--map` runs the default tests (or those of the given paths) and records which test runs which line of the mutated
files, in all of the test's processes, and how long the test takes. The map is kept in `runs/mutants/map.json` and grows
with each call, until a mutated file changes. All default tests take about an hour on one core.

Without either option, the script puts each mutant into a copy of the working tree, and runs the tests that ran the
mutant's lines without it, until three have failed: cheapest first, all test functions before their further cases, at
most `--seconds` in all. A test that hangs has noticed the mutant, too. The results are in `results/mutants.json`: the
tests that noticed each mutant, and how many have run. The script can be stopped at any time: without `--again`, it
skips mutants that have a result, unless fewer than three tests noticed the mutant and the map knows more tests by now.
All mutants are expected to take 60 to 90 minutes on two cores: at most 20 seconds of tests each, plus the start of
pytest. The exit status is 1 if a mutant that was noticed before is not noticed any more.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "benchmarks" / "mutants"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
MAP = ROOT / "runs" / "mutants" / "map.json"
ENOUGH = 3
"""Tests that notice a mutant, after which no more are run."""


@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, which occurs once in `file`, becomes `new`."""

    room: str
    name: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.room}: {self.name}"

    def applied(self, text: str) -> str:
        """The text of the mutant's file with the fault."""
        return text.replace(self.old, self.new, 1)

    def problem(self) -> str | None:
        """Why the mutant cannot be applied any more, or None."""
        path = ROOT / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := text.count(self.old)) != 1:
            return f"its text occurs {count} times in {self.file}"
        try:
            return None if _tree(self.applied(text)) != _tree(text) else "its replacement changes nothing"
        except SyntaxError as error:
            return f"its replacement is not valid Python: {error}"

    def lines(self) -> set[int]:
        """The lines of the innermost statements that the mutant replaces; all lines of the file's functions if these
        statements run when the file is imported.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        place = text.index(self.old)
        first, last = (text.count("\n", 0, end) + 1 for end in (place, place + len(self.old)))
        found: set[int] = set()
        every: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                for statement in (each for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node):
                    start, end = statement.lineno, statement.end_lineno or statement.lineno
                    inner = [each.lineno for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
                    end = min([end, *(line - 1 for line in inner)])
                    every |= set(range(start, end + 1))
                    if start <= last and first <= end:
                        found |= set(range(start, end + 1))
        return found or every


@cache
def _tree(text: str) -> str:
    return ast.dump(ast.parse(text))


def mutants() -> list[Mutant]:
    """All mutants, in the order of their files."""
    found = []
    for path in sorted(MUTANTS.glob("*.txt")):
        file = ""
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            lines = [line for line in block.splitlines() if line and not line.startswith("#")]
            if lines and lines[0].startswith("@ "):
                file = lines.pop(0).removeprefix("@ ")
            if lines:
                old, new = ("\n".join(line[1:] for line in lines[1:] if line[0] == sign) for sign in "-+")
                found.append(Mutant(path.stem, lines[0], file, old, new))
    return found


def problems() -> list[str]:
    """One line for each mutant that cannot be applied, or whose name is not unique."""
    found = mutants()
    names = [str(mutant) for mutant in found]
    twice = [f"{name} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    return twice + [f"{mutant}: {problem}" for mutant in found if (problem := mutant.problem())]


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """A folder with a copy of the working tree, removed on exit; neither git's nor Python's files are copied."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in filter(None, names):
            if (ROOT / name).exists():
                target = Path(folder, "tree", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        yield Path(folder, "tree")


def run_tests(
    tree: Path, tests: Sequence[str], *options: str, lines: bool = False, seconds: float | None = None
) -> None:
    """Run tests of a copy. `watched_tests` and `sitecustomize` write to the folder `record` next to the copy.

    Raises LookupError if a test does not exist.
    """
    folder, hook = tree.parent / "record", tree / "benchmarks" / "mutants" / "hook"
    (folder / "tests").write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{hook}{os.pathsep}{tree}", "OUTCOMES_IN": str(folder)}
    environment["OMP_NUM_THREADS"] = "1"
    if lines:
        environment["LINES_IN"] = str(folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "watched_tests", "-p", "no:cacheprovider", *options]
    with open(folder / "output", "w") as output:
        # In a session of its own, because Ctrl-C must not end a test in the middle: it would seem to have failed.
        process = subprocess.Popen(
            [*command, f"@{folder / 'tests'}"],
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    output = (folder / "output").read_text()
    # "found no collectors" means that a file of tests cannot be imported: the mutant is noticed.
    if process.returncode == pytest.ExitCode.USAGE_ERROR and "not found: " in output:
        raise LookupError(f"the tests have changed: run --map again ({output[-200:].strip()})")


def _end(process: subprocess.Popen) -> None:
    """End a pytest that still runs, as Ctrl-C does, so that it ends the ranks that it has started."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)


def outcomes(folder: Path) -> tuple[dict[str, float], list[str]]:
    """The seconds of each test that has passed, and the tests that have failed, in order."""
    path, seconds, phases = folder / "outcomes", {}, {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        seconds[line["test"]] = seconds.get(line["test"], 0.0) + line["seconds"]
        phases.setdefault(line["test"], []).append(line["outcome"])
    passed = {test: seconds[test] for test, ends in phases.items() if ends == ["passed"] * 3}
    # A test without an end was ended with its process.
    return passed, [test for test, ends in phases.items() if "failed" in ends or ends in (["passed"], ["passed"] * 2)]


def _digests() -> dict[str, str]:
    files = sorted({mutant.file for mutant in mutants()})
    return {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files}


def make_map(paths: Sequence[str]) -> None:
    """Run tests and add to the map which lines they run; keep what it says on other tests if no file has changed."""
    digests, known = _digests(), json.loads(MAP.read_text()) if MAP.exists() else {}
    tests: dict[str, Any] = known["tests"] if known.get("files") == digests else {}
    with copy_of_the_tree() as tree:
        folder = tree.parent / "record"
        folder.mkdir()
        (folder / "files").write_text("".join(f"{tree / file}\n" for file in digests), encoding="utf-8")
        (folder / "current").write_text("0".ljust(20))
        with suppress(KeyboardInterrupt):  # What has run until then counts.
            run_tests(tree, paths, lines=True)
        passed, failed = outcomes(folder)
        print((folder / "output").read_text(encoding="utf-8").splitlines()[-1])
        order = (folder / "order").read_text(encoding="utf-8").splitlines()
        ran: list[dict[str, set[int]]] = [{} for _ in order]
        names = list(digests)
        for line in set((folder / "lines").read_text().splitlines()):
            test, file, number = map(int, line.split())
            ran[test].setdefault(names[file], set()).add(number)
    for test, lines in zip(order, ran, strict=True):
        tests.pop(test, None)
        if test in passed:
            tests[test] = {"seconds": passed[test], "lines": {file: sorted(each) for file, each in lines.items()}}
    MAP.parent.mkdir(parents=True, exist_ok=True)
    MAP.write_text(json.dumps({"files": digests, "tests": tests}))
    print("\n".join([f"{len(passed)} tests mapped, {len(tests)} in all; left out, because they fail:", *failed]))


def chosen_tests(mutant: Mutant, tests: dict[str, Any], most_seconds: float) -> dict[str, float]:
    """The tests that run a mutant's lines, with their seconds: the cheapest case of every test function, cheapest
    first, then every function's second case, and so on.
    """
    lines = mutant.lines()
    seconds = {name: each["seconds"] for name, each in tests.items()}
    cases: dict[str, list[str]] = {}
    for test in sorted(seconds, key=seconds.__getitem__):
        if not lines.isdisjoint(tests[test]["lines"].get(mutant.file, ())):
            cases.setdefault(test.partition("[")[0], []).append(test)
    found: dict[str, float] = {}
    for turn in zip_longest(*cases.values()):
        for test in filter(None, turn):
            if not found or sum(found.values()) + seconds[test] <= most_seconds:
                found[test] = seconds[test]
    return found


def try_mutant(mutant: Mutant, tree: Path, tests: dict[str, float]) -> dict[str, Any]:
    """Run tests against a mutant in a copy; return which of them notice it, and how many have run."""
    path, record = tree / mutant.file, tree.parent / "record"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    limits = {test: 3 * seconds + 10 for test, seconds in tests.items()}
    (record / "limits").write_text(json.dumps(limits), encoding="utf-8")
    before = path.read_text(encoding="utf-8")
    try:
        _write(path, mutant.applied(before))
        run_tests(tree, list(tests), f"--maxfail={ENOUGH}", seconds=sum(limits.values()) + 60)
    finally:
        _write(path, before)
    passed, failed = outcomes(record)
    if not passed and not failed:  # The file cannot even be imported, or the run hung before it had run a test.
        failed = list(tests)[:ENOUGH]
    return {"noticed": failed, "ran": len(passed) + len(failed)}


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):  # It may be as old as the text, and as long.
        compiled.unlink()


def run(chosen: Sequence[Mutant], jobs: int, most_seconds: float, again: bool) -> list[str]:
    """Try mutants and write their results; return the names of those that were noticed before and no more."""
    known = json.loads(MAP.read_text()) if MAP.exists() else sys.exit("there is no map: run --map first")
    digests = _digests()
    old = sorted({mutant.file for mutant in chosen if known["files"].get(mutant.file) != digests[mutant.file]})
    if old:
        sys.exit(f"the map is older than {', '.join(old)}: run --map again")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lost: list[str] = []
    lock, trees = Lock(), SimpleQueue()

    def is_left(mutant: Mutant) -> bool:
        before = results.get(str(mutant))
        if again or before is None:
            return True
        return len(before["noticed"]) < ENOUGH and before["ran"] < len(
            chosen_tests(mutant, known["tests"], most_seconds)
        )

    def one(mutant: Mutant) -> None:
        tests = chosen_tests(mutant, known["tests"], most_seconds)
        before = results.get(str(mutant), {"noticed": ()})
        tests = {test: known["tests"][test]["seconds"] for test in before["noticed"] if test in known["tests"]} | tests
        if not tests:
            print(f"{mutant}: no test of the map runs its lines", flush=True)
            return
        tree = trees.get()
        try:
            found = try_mutant(mutant, tree, tests)
        finally:
            trees.put(tree)
        with lock:
            if before["noticed"] and not found["noticed"]:
                lost.append(str(mutant))
            results[str(mutant)] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{mutant}: {len(found['noticed']) or 'NONE'} of {found['ran']} tests notice it", flush=True)

    left = [mutant for mutant in chosen if is_left(mutant)]
    print(f"{len(left)} of {len(chosen)} mutants to try", flush=True)
    with copy_of_the_tree() as first, ThreadPoolExecutor(jobs) as pool:
        trees.put(first)
        for number in range(1, jobs):
            trees.put(shutil.copytree(first, first.parent / str(number) / "tree"))
        tried = [pool.submit(one, mutant) for mutant in left]
        try:
            for each in tried:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)  # Those that have begun are finished.
    return lost


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="verify that all mutants can be applied")
    parser.add_argument("--map", nargs="*", metavar="PATH", help="record which tests run which lines")
    parser.add_argument("--room", action="append", choices=sorted(path.stem for path in MUTANTS.glob("*.txt")))
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants with TEXT in their names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="most seconds of tests for each mutant")
    parser.add_argument("--again", action="store_true", help="also try mutants that have a result")
    options = parser.parse_args()
    if found := problems():
        sys.exit("\n".join(["where a mutant's code went, write the same fault for the new code:", *found]))
    if options.map is not None:
        make_map(options.map or ["tests"])
    elif not options.check:
        chosen = [
            each for each in mutants() if each.room in (options.room or [each.room]) and options.only in str(each)
        ]
        if lost := run(chosen, options.jobs, options.seconds, options.again):
            sys.exit("\n".join(["noticed before, and not any more:", *lost]))


if __name__ == "__main__":
    main()
