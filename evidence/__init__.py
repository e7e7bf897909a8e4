"""Published figures, and scripts that compare the cost model with them. None of it is part of the package."""

from __future__ import annotations

import csv
from pathlib import Path

DATA = Path(__file__).parent / "data"


def figures(name: str) -> list[dict[str, str]]:
    """Read a CSV file of published figures from `evidence/data`."""
    return list(csv.DictReader((DATA / name).read_text(encoding="utf-8").splitlines()))
