"""Compares the installed Megatron with the symbols and arguments that `scripts/lock_megatron.py` recorded."""

from __future__ import annotations

import argparse
import inspect
import re
from typing import Any

from megatron_vp.mcore.patches import locked, misfit, original_of, signature_of


def described(value: Any) -> str:
    """Return `class` for a class, and `signature_of` any other value."""
    return "class" if inspect.isclass(value) else signature_of(value)


def changed_symbols() -> list[str]:
    """Return the symbols that we use without patching them and that are missing or do not accept our calls.

    A symbol that our sources do not call must be as recorded.
    """
    problems = []
    for target, expected in locked("used").items():
        recorded, _, calls = expected.partition(" called ")
        try:
            value = original_of(target)
        except (ImportError, AttributeError) as error:
            problems.append(misfit(target, recorded, f"nothing ({error})"))
            continue
        fits = all(_accepts(value, call) for call in re.findall(r"\((.*?)\)", calls))
        if not fits or (not calls and recorded not in ("any", described(value))):
            problems.append(misfit(target, f"{recorded}{f', called with {calls}' if calls else ''}", described(value)))
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


def missing_options() -> list[str]:
    """Build Megatron's parser, and return the options that we read but that the parser lacks."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    missing = locked("option").keys() - {action.dest for action in parser._actions}
    return [misfit(f"the argument '{name}'", "an option", "nothing") for name in sorted(missing)]
