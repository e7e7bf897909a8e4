"""Write `megatron_vp/jobs/known_options.txt`: every option of a training script, for commands without Megatron.

    python scripts/known_options.py [--check]

`--check` writes nothing and exits with status 1 where the file is out of date.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FILE = ROOT / "megatron_vp" / "jobs" / "known_options.txt"
HEADER = f"""\
# Made by {Path(__file__).relative_to(ROOT)} from Megatron's parser and our options; do not edit.
# A line per option: its name, what it takes (+: several values), and the choices it has.
"""


def lines() -> Iterator[str]:
    """A line for every option that a training script takes; without those that only ask for help."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_vp.mcore.options.arguments import with_ours

    parser = with_ours(add_megatron_arguments)(argparse.ArgumentParser(allow_abbrev=False))
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            yield from (_line(option, action) for option in action.option_strings)


def _line(option: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return f"{option.lstrip('-')} switch"
    several = "" if action.nargs is None else "+"
    kind = action.type.__name__ if action.type in (int, float, bool) else "text"
    names = [str(getattr(choice, "name", choice)) for choice in action.choices or () if choice not in signal.Signals]
    return " ".join(filter(None, (option.lstrip("-"), kind + several, ",".join(names))))


def content() -> str:
    """The whole file."""
    return HEADER + "".join(f"{line}\n" for line in sorted(lines()))


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        FILE.write_text(content())
    elif FILE.read_text() != content():
        sys.exit(f"{FILE.relative_to(ROOT)} is out of date: run python {Path(__file__).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
