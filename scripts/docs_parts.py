"""Generates parts of the documentation's pages when the site is built.

A page marks the place of a part with a line `<!-- generated: NAME -->`, where NAME is a key of PARTS.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
MARK = re.compile(r"^<!-- generated: (?P<name>\w+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """Fill in the generated parts of a page. Raises KeyError for a name that is not in PARTS."""
    return MARK.sub(lambda found: part(found["name"]).replace(" %", "\N{NO-BREAK SPACE}%"), page)


@functools.cache
def part(name: str) -> str:
    """Generate the part that PARTS has under `name`."""
    return PARTS[name]().strip()


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    """Format a table in Markdown."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    # A bar separates cells, except inside code.
    lines += [
        f"| {' | '.join(re.sub(r'(`[^`]*`)|\|', lambda x: x[1] or '&#124;', cell) for cell in row)} |" for row in rows
    ]
    return "\n".join(lines)


def commands() -> str:
    """All commands with their options and examples, under the headings of `megatron-vp --help`."""
    from megatron_vp.cli.app import SECTIONS, app

    top: Any = typer.main.get_command(app)
    pieces = []
    for title, names in SECTIONS.items():
        pieces.append(f"## {title}")
        for name in names:
            pieces += _command(top.commands[name], f"megatron-vp {name}")
    return "\n\n".join(pieces)


def _command(command: Any, name: str) -> list[str]:
    """Paragraphs on a command: heading, purpose, options and example; for a group, also its commands' paragraphs."""
    pieces = [f"### {name}", *_paragraphs(command.help or "")]
    if isinstance(getattr(command, "commands", None), dict):
        return pieces + [piece for key, each in command.commands.items() for piece in _command(each, f"{name} {key}")]
    context = click.Context(command, info_name=name)
    rows = []
    for option in command.params:
        record = option.get_help_record(context)
        if record is not None:
            kind = re.sub(r"<(?:int range|int)>", "N", re.sub(r"<(?:list\[)?str\]?>", "TEXT", record[0]))
            kind = (
                kind.replace("<float>", "X").replace("<path>", "PATH").replace("CONFIG [FLAGS] TEXT", "CONFIG [FLAGS]")
            )
            rows.append((_code(kind), _typed(_one_line(record[1]))))
    if rows:
        pieces.append(table(("option", "meaning"), rows))
    if command.epilog:
        pieces.append("```text\n" + command.epilog.partition("\b\n")[2].strip() + "\n```")
    return pieces


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a help text, with its indented and verbatim lines as code."""
    found = []
    for each in inspect.cleandoc(text).split("\n\n"):
        lines = each.removeprefix("\b\n").splitlines()
        verbatim = each.startswith("\b") or all(line.startswith(("megatron-vp ", "torchrun ", "  ")) for line in lines)
        found.append("\n".join(["```bash", *lines, "```"]) if verbatim else _typed(_one_line(each)))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    return f"`{_one_line(text)}`"


def _typed(text: str) -> str:
    """A text with its flags marked as code, and with characters escaped that Markdown would read as HTML."""
    text = text.replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(?<![\w`-])--[\w-]+", r"`\g<0>`", text)


def flags() -> str:
    """A table of the training flags that this package adds to Megatron's."""
    rows = []
    for action in _our_actions():
        given = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        takes = "" if action.nargs == 0 else f" {given or action.dest.upper()}"
        default = "" if action.default in (None, False) else f"`{action.default}`"
        rows.append((_code(action.option_strings[0] + takes), default, _typed(_one_line(action.help or ""))))
    return table(("flag", "default", "meaning"), rows)


def configuration_keys() -> str:
    """A table of the keys of a YAML file that correspond to this package's training flags."""
    rows = []
    for action in _our_actions():
        if action.dest != "config":
            kind = "true or false" if action.nargs == 0 else "number" if action.type in (int, float) else "text"
            rows.append((f"`{action.dest}`", kind, f"`{action.option_strings[0]}`"))
    return table(("key", "value", "flag"), rows)


def _our_actions() -> list[Any]:
    from megatron_vp.mcore.options.arguments import our_parser

    return our_parser()._actions


def configurations() -> str:
    """A table of the configuration files in the package, each described by its first comment."""
    rows = []
    folder = ROOT / "megatron_vp" / "configs"
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        comment = re.match(r"(?:#.*\n)+", text)
        said = re.sub(r"(?m)^# ?", "", comment[0]) if comment else _code(yaml.safe_dump(_leaves(text)).strip("{}\n"))
        rows.append((f"`{path.relative_to(folder)}`", _typed(_one_line(said)) if comment else said))
    return table(("file", "content"), rows)


def _leaves(text: str) -> dict[str, Any]:
    """The keys and values of a short overlay file."""
    return {key: value for section in yaml.safe_load(text).values() for key, value in section.items()}


def python_interface() -> str:
    """The Python interface: signatures and docstrings of everything that programs may import."""
    import megatron_vp
    from megatron_vp import schedule
    from megatron_vp.mcore.start.enabled import Handle

    pieces = ["## megatron_vp", *_documented("enable", megatron_vp.enable)]
    for name in ("whole_vocabulary", "token_log_probs", "TokenRequest", "TokenOutputs"):
        pieces += _documented(name, getattr(megatron_vp, name))
    pieces += _documented("Handle", Handle)
    pieces += ["## megatron_vp.schedule"]
    for name in SCHEDULE_FUNCTIONS:
        pieces += _documented(name, getattr(schedule, name))
    return "\n\n".join(pieces)


SCHEDULE_FUNCTIONS = ("generate", "validate", "simulate", "lower", "to_json", "from_json", "to_csv", "from_csv")


def _documented(name: str, what: Any) -> list[str]:
    """Paragraphs on a function or class: heading, signature and docstring; a class also has the paragraphs of its
    methods.
    """
    pieces = [f"### {name}", *_docstring(what)]
    if not inspect.isclass(what):
        pieces.insert(1, f"```python\n{_signature(name, what)}\n```")
        return pieces
    for method, value in vars(what).items():
        if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            owner = name.rpartition(".")[2].lower()
            shown = _signature(f"{owner}.{method}", value) if callable(value) else f"{owner}.{method}"
            pieces += [f"```python\n{shown}\n```", *_docstring(value)]
    return pieces


def _signature(name: str, what: Any) -> str:
    """The signature as source code, with one line per parameter if one line would be too long."""
    signature = inspect.signature(what)
    kept = [each for each in signature.parameters.values() if each.name != "self"]
    text = f"{name}{signature.replace(parameters=kept)}".replace("'", "")
    if len(text) <= 84:
        return text
    stars = {each.name for each in kept if each.kind is each.KEYWORD_ONLY}
    lines = []
    for each in kept:
        lines += ["    *,"] * (each.name in stars and "    *," not in lines) + [f"    {each},".replace("'", "")]
    return "\n".join([f"{name}(", *lines, f") -> {signature.return_annotation}".replace("'", "")])


def _docstring(what: Any) -> list[str]:
    """The paragraphs of a docstring, with the entries under Args, Returns and Raises as lists."""
    found = []
    for paragraph in inspect.getdoc(what).split("\n\n"):  # type: ignore[union-attr]
        title, _, rest = paragraph.partition("\n")
        if title.rstrip() in ("Args:", "Returns:", "Raises:", "Yields:"):
            lines = re.sub(r"\n\s{6,}", " ", inspect.cleandoc(rest) and "\n" + rest).strip().splitlines()
            found.append("\n".join([f"**{title.rstrip()[:-1]}**\n", *(f"- {line.strip()}" for line in lines)]))
        else:
            found.append(_typed(_one_line(paragraph)))
    return found


def _compatibility(name: str) -> Callable[[], str]:
    def made() -> str:
        import compatibility

        return getattr(compatibility, name)()

    return made


def public_runs() -> str:
    """A table of published runs of Megatron next to their predictions."""
    from evidence.comparison import predicted, to_markdown
    from evidence.public_rows import read_rows

    return to_markdown([predicted(row) for row in read_rows()])


def schedules() -> str:
    """A table of all values of `--pipeline-schedule`."""
    from megatron_vp.schedule import FAMILIES

    rows = [(f"`{name}`", family.summary, f"`{family.peak}`") for name, family in FAMILIES.items()]
    return table(("`--pipeline-schedule`", "description", "peak activations of rank r, in microbatches"), rows)


def roofline() -> str:
    """Tables of what bounds S and T on H100, H200 and B200."""
    from evidence.roofline import lines, markdown

    return markdown(list(lines()))


def host_links() -> str:
    """A table of copies to host memory, by GPU."""
    from megatron_vp.cost.hardware.gpus import GIGA, HARDWARE

    rows = []
    for name, hardware in HARDWARE.items():
        host = hardware.host
        rows.append((name, *(f"{figure:g}" for figure in (host.out / GIGA, host.back / GIGA, host.memory / GIB))))
    return table(("GPU", "to the host, GB/s", "from the host, GB/s", "host memory per GPU, GiB"), rows)


def memory_by_layer() -> str:
    """A table, by job, of the memory counted in a shapes-only replay and the predicted memory."""
    from memory_agrees import lines_of, table_of

    return table_of(lines_of(RESULTS / "memory_agrees.jsonl"))


def optimality() -> str:
    """A table that compares the makespans of small schedules with the shortest possible makespans."""
    import optimality

    return optimality.table(optimality.read_results())


def memory_of_the_papers_models() -> str:
    """A table, for the paper's models, of the memory counted in a shapes-only replay and the predicted memory."""
    text = (RESULTS / "replay_shapes.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "error" not in line]
    off = [100 * abs(line["predicted_bytes"] / line["memory_bytes"]["peak"] - 1) for line in lines]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        if line["pipeline_rank"] in (0, line["pipeline_size"] - 1):
            key = line["model"], f"{line['vocab_size'] // 1024}k", line["method"]
            rows.setdefault(key, []).extend(
                f"{size / GIB:.2f}" for size in (line["memory_bytes"]["peak"], line["predicted_bytes"])
            )
    heads = ("first stage: counted", "predicted", "last stage: counted", "predicted")
    found = table(("model", "vocabulary", "method", *heads), [(*key, *cells) for key, cells in rows.items()])
    return (
        f"{found}\n\nThe mean difference of {len(off)} ranks is {fmean(off):.1f} %, and the largest {max(off):.1f} %."
    )


def schedule_page() -> str:
    """An interactive page with two schedules, one above the other, that can be zoomed."""
    from megatron_vp.schedule import generate, simulate
    from megatron_vp.schedule.web_page import to_html

    return to_html([simulate(generate(name, 4, 12, vocab="vocab-2")) for name in ("1f1b", "v-half")])


PARTS: dict[str, Callable[[], str]] = {
    **{each.__name__: each for each in (commands, flags, configuration_keys, configurations, python_interface)},
    **{each.__name__: each for each in (schedules, public_runs, roofline, host_links, optimality)},
    **{each.__name__: each for each in (memory_by_layer, memory_of_the_papers_models)},
    **{
        name: _compatibility(name)
        for name in ("tested", "surveyed", "moved", "refused", "ignored", "uncounted", "not_yet", "patched")
    },
}
FILES: dict[str, Callable[[], str]] = {"schedule.html": schedule_page}
"""The files that are made during the build, by their path in the site."""
