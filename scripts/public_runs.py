"""Write the tables of docs/public_runs.md: published runs of Megatron next to their predictions.

    python scripts/public_runs.py

A test of the cost model holds the page equal to the present code.
"""

from __future__ import annotations

from pathlib import Path

from megatron_vp.cost.public.comparison import predicted, to_markdown
from megatron_vp.cost.public.public_rows import read_rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "public_runs.md"
BEGIN, END = "<!-- begin runs -->\n", "<!-- end runs -->\n"


def main() -> None:
    """Run the command."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    table = to_markdown([predicted(row) for row in read_rows()])
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
