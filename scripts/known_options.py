"""Write `megatron_vp/jobs/known_options.jsonl`, which lists all training options for commands without Megatron.

    python scripts/known_options.py [--check]

If the installed Megatron is of a later series than the first supported one, the script writes
`known_options_SERIES.jsonl` with the options that this series adds or changes. `--check` writes nothing and exits with
status 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import enum
import json
import sys
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FOLDER = ROOT / "megatron_vp" / "jobs"
FILE = FOLDER / "known_options.jsonl"
_KINDS = {
    **{"int": "int", "float": "float", "bool": "bool", "tuple_type": "integers"},
    **dict.fromkeys(("moe_freq_type", "la_freq_type", "no_rope_freq_type"), "pattern"),
}
"""The type of an option's value by the function that Megatron's parser calls; all other values are text."""


def lines() -> Iterator[str]:
    """Yield a line for every option that a training script accepts, except those that only print help."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_vp.mcore.options.arguments import with_ours

    parser = with_ours(add_megatron_arguments)(argparse.ArgumentParser(allow_abbrev=False))
    return (_line(action) for action in parser._actions if not isinstance(action, argparse._HelpAction))


def _line(action: argparse.Action) -> str:
    """The option's names and the arguments of `add_argument`, as JSON."""
    from megatron.core.transformer.enums import CudaGraphModule

    options = [f"--{option.lstrip('-')}" for option in action.option_strings]
    if action.nargs == 0:
        pair = [option for option in options if f"--no-{option[2:]}" in options]
        return json.dumps([pair or options, {"action": "pair" if pair else "store_true"}])
    choices = list(action.choices or ())
    if choices and isinstance(choices[0], enum.Enum):
        choices = list(type(choices[0]).__members__)  # with the aliases, such as SIGCLD
    elif getattr(action.type, "__name__", "") == "_parse_cuda_graph_modules_arg":
        choices = [*CudaGraphModule.__members__, "full", "full_iteration", "full_iteration_inference"]
    kind = _KINDS.get(getattr(action.type, "__name__", ""), "text")
    default = None if action.nargs else getattr(action.default, "name", action.default)
    if kind == "text":
        choices = list(map(str, choices))
    if default not in (None, False, "") and kind in ("text", "float"):
        default = str(default) if kind == "text" else float(default)
    how = {"type": kind, "nargs": action.nargs, "choices": choices, "default": default}
    return json.dumps([options, {name: value for name, value in how.items() if value not in (None, False, "", [])}])


def content(known: Container[str] = ()) -> str:
    """The content of the file, without the lines in `known`."""
    return "".join(f"{line}\n" for line in sorted(lines()) if line not in known)


def of_this_megatron() -> tuple[Path, str]:
    """The file for the installed release, and its expected content."""
    from megatron_vp.mcore.patches import SUPPORTED_SERIES, present_series

    series = present_series()
    if series == SUPPORTED_SERIES[0]:
        return FILE, content()
    return FOLDER / f"known_options_{series}.jsonl", content(FILE.read_text().splitlines())


def main() -> None:
    """Write the file or, with `--check`, compare it with the expected content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    file, expected = of_this_megatron()
    if not check:
        file.write_text(expected)
    elif file.read_text() != expected:
        sys.exit(f"{file.relative_to(ROOT)} is out of date: run python {Path(__file__).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
