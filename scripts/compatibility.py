"""Generates the tables of the compatibility page from the tables of tests, refusals and patches."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_vp.jobs.options import OPTIONS, RUNS, UNCOUNTED, UNREAD, Option, Term  # noqa: E402
from megatron_vp.mcore.options.refusals import REFUSALS  # noqa: E402
from megatron_vp.mcore.patch_table import GROUPS, patches_of  # noqa: E402
from tests.mcore.case_parts import (  # noqa: E402
    COMBINATIONS,
    MOVES,
    NOT_YET,
    PROOFS,
    SURVEY,
    SURVEY_BOUND,
    SURVEY_WAYS,
)
from tests.mcore.test_option_survey import covered  # noqa: E402


def flags(options: Mapping[str, object], *before: str) -> str:
    """Options in Markdown as a user types them, after the words in `before`."""
    words = list(before)
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if name == "untie_embeddings_and_output_weights":
            words.append("tied")
        elif value is not None and value is not False:
            given = "" if value is True else f" {' '.join(map(str, value)) if isinstance(value, list) else value}"
            words.append(f"`{option}{given}`".replace("|", "\\|"))
    return ", ".join(words)


def typed(text: str) -> str:
    """A text in Markdown with its flags marked as code."""
    return re.sub(r"--[\w-]+", r"`\g<0>`", text)


def tested() -> str:
    """A table of all test cases with the schedules under which each ran, and a table of proofs in other tests."""
    lines = ["| feature | options, in addition to p = 2 | `--pipeline-schedule` and algorithm |", "|---|---|---|"]
    for case in COMBINATIONS:
        size = [] if case.size == 2 else [f"p = {case.size}"]
        replicas = [f"{case.replicas} replicas"] if case.replicas > 1 else []
        options = flags({**case.options, **case.ours}, *size, *replicas)
        lines.append(f"| {case.name} | {options} | {', '.join(case.ways).replace('/', ' ')} |")
    lines += ["", "| | tested by |", "|---|---|"]
    lines += [f"| {name} | `tests/{test.replace('::', '`, `')}` |" for name, test in PROOFS.items()]
    return "\n".join(lines)


def surveyed() -> str:
    """Generate a paragraph on the coverage of the option survey, and a table of all its jobs."""
    jobs = [job for group in SURVEY.values() for job in group]
    runs = sum(len(job.ways) for job in jobs)
    lines = [
        f"**{len(jobs)} jobs, {runs} runs, {len(covered())} of Megatron's options.** A job runs "
        f"as {', '.join(SURVEY_WAYS).replace('/', ' ')}, unless its row names other ways.",
        "",
        "| subject | job | options | other ways, bounds |",
        "|---|---|---|---|",
    ]
    for group, members in SURVEY.items():
        for job in members:
            size = [] if job.size == 2 else [f"p = {job.size}"]
            replicas = [f"{job.replicas} replicas"] if job.replicas > 1 else []
            options = flags({name: _short(value) for name, value in job.options.items()}, *size, *replicas)
            then = f"; then {flags(job.then)}" if job.then else ""
            ways = [] if job.ways == SURVEY_WAYS else [", ".join(job.ways).replace("/", " ")]
            bound = [] if job.bound == SURVEY_BOUND else [f"within {job.bound:g}"]
            lines.append(
                f"| {group} | {job.name} | {options}{then} | {'; '.join([*ways, *bound, *filter(None, [job.why])])} |"
            )
    return "\n".join(lines)


def _short(value: object) -> object:
    """Shorten a JSON value, which would be too long for a table."""
    return "JSON" if isinstance(value, str) and value.startswith("{") and '"' in value else value


def moved() -> str:
    """A table of all tested moves of checkpoints between layouts."""
    lines = ["| checkpoint | options | trained in | moved to, and back |", "|---|---|---|---|"]
    for move in MOVES:
        carried = ["bit for bit"] if move.carried else []
        first, *rest = (other.replace("/", " ") for other in move.others)
        others = ", ".join([f"{first} *" if move.default else first, *rest])
        options = flags(move.options, *carried)
        lines.append(f"| {move.name} | {options} | {move.start.replace('/', ' ')} | {others} |")
    return "\n".join(lines)


OUR_SCHEDULE = "--vocab-parallel or --pipeline-schedule {pipeline_schedule}"


SIGNS = {"": "", "not": "", "unless": "", "=": " ", "!=": " other than ", ">": " above "}


def _given(option: Option) -> str:
    """The conditions of a record in words."""
    ways = [[group.split("/") for group in way.split(" and ")] for way in option.given.split(" or ")]
    text = ", or ".join(" and ".join(" or ".join(map(_term, group)) for group in way) for way in ways)
    return text.replace(" and unless ", " unless ")


def _term(text: str) -> str:
    term = Term.of(text)
    flag = f"{term.sign + ' ' if term.sign in ('not', 'unless') else ''}--{term.name.replace('_', '-')}"
    return f"{flag}{SIGNS[term.sign]}{term.wanted.replace('|', ' or ').replace('None', 'unset')}"


def refused() -> str:
    """The messages of all refusals. Values that are filled in from the arguments appear in capitals."""
    options = [option.message(_given(option), "") for option in OPTIONS if option.run in RUNS and not option.does]
    combinations = list(REFUSALS.values())
    return typed(
        "\n\n".join(
            f"### {title}\n\n" + "\n".join(map(_listed, messages))
            for title, messages in (("Options of Megatron", options), ("Our own options", combinations))
        )
    )


def _listed(message: str) -> str:
    text = message.replace("{our_schedule}", OUR_SCHEDULE)
    return "- " + re.sub(r"{(\w+)}", lambda name: name[1].upper(), text)


def ignored() -> str:
    """A list of all options that a run accepts but that do not have their intended effect."""
    found = [option for option in OPTIONS if option.run == UNREAD or option.does]
    return typed("\n".join(_listed(option.message(_given(option), "our schedules")) for option in found))


def uncounted() -> str:
    """A list of the options that the cost model does not count, with the values that have no effect."""
    return typed(
        "\n".join(
            f"- --{name.replace('_', '-')}" + (f" (except {', '.join(map(str, harmless))})" if harmless else "")
            for name, harmless in UNCOUNTED.items()
        )
    )


def not_yet() -> str:
    """A list of what was neither tested nor refused."""
    return "\n".join(f"- {what}" for what in NOT_YET)


def patched() -> str:
    """A table of all groups of patches: for which runs, when, which symbols, and what happens without them."""
    lines = ["| group | applies | applied | symbols | without it |", "|---|---|---|---|---|"]
    for group in GROUPS:
        symbols = ", ".join(dict.fromkeys(_symbol(patch.target) for patch in patches_of(group.name)))
        cells = (typed(group.sentence), group.stage, symbols, typed(group.without))
        lines.append(f"| {group.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _symbol(target: str) -> str:
    """A patch's target without Megatron's module."""
    module, _, path = target.partition(":")
    return f"`{path if module.startswith('megatron.') else f'{module}.{path}'}`"
