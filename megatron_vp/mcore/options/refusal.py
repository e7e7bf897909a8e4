"""Defines the entries of the tables of refusals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot work: the test, and the message that says what cannot work, why, and what works
    instead.
    """

    applies: Callable[[argparse.Namespace], Any]
    message: str
