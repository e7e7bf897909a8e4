"""One line of the tables of refusals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot work: `applies(args)`, and the line that says what, why and what works instead."""

    applies: Callable[[argparse.Namespace], Any]
    message: str
