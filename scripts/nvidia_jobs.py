"""List which of NVIDIA's own jobs, from a checkout of Megatron-LM, would be accepted with `--vocab-parallel`.

    python scripts/nvidia_jobs.py MEGATRON_LM [--write] [--list]

The script reads the functional tests and the shell scripts of examples that train GPT or hybrid models with two or more
pipeline stages. It runs the checks of `megatron-vp check` on each job three times: unchanged, with `--vocab-parallel`
alone (1f1b or, with virtual stages, interleaved), and with `--vocab-parallel` under v-half. `--write` writes the tables
to the evidence page, and `--list` prints every job. No job is started, and no data, tokenizer or checkpoint is read.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from unittest import mock

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_vp.errors import UserError  # noqa: E402
from megatron_vp.jobs.command_line import flag_value  # noqa: E402
from megatron_vp.mcore.start import preflight  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "nvidia_jobs.md"


def nodes(capability: str) -> str:
    """Describe nodes with the packages of NVIDIA's own containers and GPUs of a compute capability."""
    return f"te=2.20.2,apex=yes,cc={capability}"


OTHER_MODELS = {"bert", "common", "mimo", "multimodal-llava", "t5"}
"""The folders of functional tests for models that are neither GPT nor hybrid."""
TRAINS = re.compile(r"\bpretrain_(gpt|mamba|hybrid)\.py")
OURS = ("own schedule", "v-half")


@dataclass(frozen=True, eq=False)
class Job:
    """One of NVIDIA's jobs: its source, command line and environment."""

    group: str
    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    nodes: str = nodes("9.0")

    @property
    def ranks(self) -> int:
        """The number of ranks of the job: the ranks of one replica, or of as many replicas as fit into a node with 8
        GPUs.
        """
        size = {name: int(flag_value(list(self.words), f"--{name}-parallel-size") or 1) for name in _SIZES}
        experts = flag_value(list(self.words), "--expert-tensor-parallel-size")
        tensor = int(experts) if experts else size["tensor-model"]
        stages = size["pipeline-model"]
        replica = stages * lcm(size["tensor-model"] * size["context"], tensor * size["expert-model"])
        return replica * max(1, 8 // replica)

    def answers(self) -> tuple[str | None, ...]:
        """The reasons why the job is refused: unchanged, under its own schedule, and under v-half; None if it is
        accepted.

        For a job that is refused unchanged, only the first reason is returned.
        """
        plain = self._judged(*self.words)
        if plain is not None:
            return (plain,)
        split = ("--vocab-parallel", "--vocab-shards", "even")  # Even where nothing is gained.
        return (
            None,
            self._judged(*self.words, *split),
            self._judged(*self._without_stages(), *split, "--pipeline-schedule", "v-half"),
        )

    def _judged(self, *words: str) -> str | None:
        """The reason for a refusal; None if the job is accepted."""
        with mock.patch.dict(os.environ, self.environment):
            try:
                preflight.check_job(list(words), self.ranks, nodes=self.nodes, own_script=True)
            except UserError as error:
                return str(error)
            return None

    def _without_stages(self) -> tuple[str, ...]:
        """The command line without options for virtual stages, because v-half itself has two per rank."""
        words, left = [], iter(self.words)
        for word in left:
            if word in _STAGES:
                next(left)
            else:
                words.append(word)
        return tuple(words)


_SIZES = ("tensor-model", "context", "pipeline-model", "expert-model")
_STAGES = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


def functional_tests(checkout: Path) -> Iterator[Job]:
    """The functional tests that train a GPT or a hybrid model."""
    folder = checkout / "tests" / "functional_tests" / "test_cases"
    for path in sorted(folder.glob("*/*/model_config.yaml")):
        group, name = path.relative_to(folder).parts[:2]
        config = yaml.safe_load(re.sub(r"\$\{?(\w+)\}?", r"/NOWHERE/\1", path.read_text(encoding="utf-8")))
        options = config.get("MODEL_ARGS")
        if group in OTHER_MODELS or config.get("MODE") in ("inference", "rl") or not isinstance(options, dict):
            continue
        words = tuple(word for option, value in options.items() for word in _typed(option, value))
        variables = {key: str(value) for key, value in (config.get("ENV_VARS") or {}).items()}
        yield Job(f"functional tests: {group}", name, words, variables)


def _typed(option: str, value: object) -> list[str]:
    """An option as the tests' own launcher writes it."""
    if value is True or value is None or value == "":
        return [option]
    text = str(value).strip()
    if isinstance(value, list):
        return [option, *map(str, value)]
    if text.startswith("[") and text.endswith("]"):
        return [option, *text[1:-1].split()]
    return [option, text.strip("'\"")]


def examples(checkout: Path) -> Iterator[Job]:
    """The examples whose shell scripts start one of Megatron's training scripts for these models."""
    for path in sorted((checkout / "examples").glob("**/*.sh")):
        text = path.read_text(encoding="utf-8")
        if TRAINS.search(text):
            yield Job("examples", str(path.relative_to(checkout / "examples")), _shell_words(text), {})


def _shell_words(text: str) -> tuple[str, ...]:
    """The options in a shell script: the words in its arrays and strings of options, with the script's own defaults."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", "\n")
    variables: dict[str, str] = {}
    for name, value in re.findall(r"(?m)^\s*(?:export\s+)?(\w+)=([^\s(][^\n]*)$", text):
        variables[name] = _filled(value.strip().strip("\"'"), variables)
    parts = re.findall(r"(?ms)^\s*\w+\+?=\(\s*$(.*?)^\s*\)", text) + re.findall(r'(?s)\w+="(\s*--[^"]*)"', text)
    words: list[str] = []
    for part in parts:
        if "nproc" in part or "DISTRIBUTED" in part:
            continue
        for word in shlex.split(_filled(part, variables)):
            words += shlex.split(word) if word.startswith("--") else [word]
    return tuple(words)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """A shell text with its variables filled in; variables that the script does not set become nonexistent paths."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return variables.get(name, (default or "").strip("\"'") or f"/NOWHERE/{name}")

    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)
    return re.sub(r"\$\(\(\s*(?:\$)?(\d+)\s*\*\s*(\d+)\s*\)\)", lambda found: str(int(found[1]) * int(found[2])), text)


def reason(answer: str) -> str:
    """The subject of a refusal, without the cause and the remedy; jobs are counted by it."""
    first = re.sub(r"^\d+ reasons: \(1\) |^\w+Error: | \(in \w+ \([^()]*\)\)$", "", answer)
    if first != answer and not first.startswith("--"):
        return re.split(r"\. |\.?$", first)[0]
    about = re.split(r" (?:is|are) not supported|: |(?<! layers) cannot ", first)[0]
    return re.sub(r"^(--vocab-parallel|--pipeline-schedule [\w-]+) with ", "", about)


def tables(source: str, answers: Mapping[Job, tuple[str | None, ...]]) -> str:
    """Tables of how many jobs of each group are accepted, and why our own schedules refuse others."""
    lines = [
        f"{source}:",
        "",
        "| jobs | with two or more stages | accepted, plain Megatron | "
        + " | ".join(f"accepted, {way}" for way in OURS)
        + " |",
        "|---|---|---|---|---|",
    ]
    counts: dict[str, Counter[str]] = {}
    for job, said in answers.items():
        for group in (job.group, "**all**"):
            count = counts.setdefault(group, Counter())
            count["jobs"] += 1
            count["plain"] += said[0] is None
            for way, answer in zip(OURS, said[1:], strict=False):
                count[way] += answer is None
    totals = counts.pop("**all**")
    for group, count in [*counts.items(), ("**all**", totals)]:
        lines.append(f"| {group} | {' | '.join(str(count[key]) for key in ('jobs', 'plain', *OURS))} |")
    refused = Counter(reason(said[1]) for said in answers.values() if len(said) > 1 and said[1] is not None)
    lines += ["", "| refused, own schedule | jobs |", "|---|---|"]
    lines += [f"| {re.sub(r'--[\w-]+', r'`\g<0>`', why)} | {count} |" for why, count in refused.most_common()]
    return "\n".join(lines)


def write(block: str, written: str) -> None:
    """Write tables to the page, between the marks of `block`."""
    begin, end = f"<!-- begin {block} -->\n", f"\n<!-- end {block} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(before + begin + written + end + rest.split(end)[1], encoding="utf-8")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/NVIDIA/Megatron-LM")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="first print every job and whether it is accepted")
    given = parser.parse_args()
    if not (given.checkout / "tests" / "functional_tests").is_dir():
        parser.error(f"{given.checkout} is not a checkout of Megatron-LM: it has no tests/functional_tests")
    commit, date = subprocess.check_output(
        ["git", "-C", str(given.checkout), "log", "-1", "--format=%h %cs"], text=True
    ).split()
    answers = {}
    for job in (*functional_tests(given.checkout), *examples(given.checkout)):
        stages = flag_value(list(job.words), "--pipeline-model-parallel-size") or "1"
        if stages.isdecimal() and int(stages) > 1:
            answers[job] = job.answers()
            if given.list:
                print(job.group, job.name, *(answer or "accepted" for answer in answers[job]), sep=" | ", flush=True)
    written = tables(f"Results for Megatron-LM at `{commit}` ({date})", answers)
    if given.write:
        write("judged", written)
    else:
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
