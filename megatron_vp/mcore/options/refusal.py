"""Defines `Refusal`, the type of the entries in the tables of refusals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A combination of arguments that cannot work. `applies` tests for the combination, and `message` says what cannot
    work, why, and what to do instead.
    """

    applies: Callable[[argparse.Namespace], Any]
    message: str
