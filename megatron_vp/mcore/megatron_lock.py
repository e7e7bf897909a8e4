"""Compares the installed Megatron with the symbols and arguments that `scripts/lock_megatron.py` recorded."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import megatron_vp
from megatron_vp.mcore.patches import Problem, locked, original_of, signature_of


def described(value: Any) -> str:
    """Return `class` for a class, and `signature_of` any other value."""
    return "class" if inspect.isclass(value) else signature_of(value)


def changed_symbols() -> list[Problem]:
    """Return the symbols that we use without patching them and that are missing or do not accept our calls.

    A symbol that our sources do not call must be as recorded.
    """
    problems = []
    for target, expected in locked("used").items():
        recorded, _, calls = expected.partition(" called ")
        try:
            value = original_of(target)
        except (ImportError, AttributeError) as error:
            problems.append(Problem(target, recorded, f"nothing ({error})"))
            continue
        fits = all(_accepts(value, call) for call in re.findall(r"\((.*?)\)", calls))
        if not fits or (not calls and recorded not in ("any", described(value))):
            problems.append(Problem(target, f"{recorded}{f', called with {calls}' if calls else ''}", described(value)))
    return problems


def _accepts(value: Any, call: str) -> bool:
    words = call.split(", ") if call else []
    names = [word for word in words if word not in ("_", "...")]
    try:
        signature = inspect.signature(value)
        bind = signature.bind_partial if "..." in words else signature.bind
        bind(*[None] * words.count("_"), **dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


def missing_options() -> list[Problem]:
    """Build Megatron's parser, and return the options that we read but that the parser lacks."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    missing = locked("option").keys() - {action.dest for action in parser._actions}
    return [Problem(f"the argument '{name}'", "an option", "nothing") for name in sorted(missing)]


def told(problem: Problem, before: str = "") -> str:
    """Return a line that says what does not fit and where our sources use it; see `places_of`."""
    return f"{problem}; used in {', '.join(places_of(problem.target, before)[:3])}"


def places_of(name: str, before: str = "") -> list[str]:
    """Return where our sources name a symbol or an argument (`before` a mark), such as `megatron_vp/mcore/x.py:7`."""
    package = Path(megatron_vp.__file__).parent
    records = package / "jobs" / "options.toml"
    ours = (file for file in sorted((package / "mcore").rglob("*.*")) if file.suffix in (".py", ".toml"))
    files = (*ours, package.with_name("pretrain_gpt_vp.py"), records)
    word = re.compile(rf"\b{re.findall(r'\w+', name)[-1]}\b{before}")
    return [
        f"{file.relative_to(package.parent)}:{number}"
        for file in files
        if file.exists()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if word.search(line)
    ] or [str(records.relative_to(package.parent))]  # It names arguments by their options, too.
