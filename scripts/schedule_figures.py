"""Write the figures and pictures of every schedule at the default costs, for docs/concepts and docs/reference.

    python scripts/schedule_figures.py [--check]

`--check` writes nothing and exits with status 1 if the figures on the page are out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_vp.schedule import FAMILIES, PassCosts, Timeline, generate, simulate
from megatron_vp.schedule.draw import to_picture
from megatron_vp.schedule.request import chunks_to_offload

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "reference" / "schedule_figures.md"
PICTURES = ROOT / "docs" / "images" / "schedules"

PLANNED = [name for name, family in FAMILIES.items() if family.planned]
SIZES = (4, 8, 16, 32)
MICROBATCHES = 128
CHART_SIZE = 16
METHODS = ("none", "vocab-2", "vocab-1", "interlaced")
MARKERS = {"none": "o", "vocab-2": "s", "vocab-1": "^", "interlaced": "D"}


def rows() -> list[tuple[str, str]]:
    """Every schedule with every vocabulary method that it has."""
    return [(name, vocab) for name, family in FAMILIES.items() for vocab in METHODS if vocab in family.methods]


def timeline(name: str, vocab: str, ranks: int, microbatches: int = MICROBATCHES) -> Timeline:
    """Generate the schedule for the default costs, and simulate it."""
    return simulate(generate(name, ranks, microbatches, vocab=vocab))


def cell(simulated: Timeline) -> str:
    """A cell of the table: makespan, bubble, and peak activations of the fullest rank."""
    return f"{simulated.makespan:.2f}, {100 * simulated.bubble_fraction:.2f} %, {max(simulated.peak_activation):g}"


def table(simulated: dict[tuple[str, str, int], Timeline]) -> str:
    """The table of all figures in Markdown."""
    lines = [
        "| schedule | vocabulary | " + " | ".join(f"p = {ranks}" for ranks in SIZES) + " |",
        "|---" * (2 + len(SIZES)) + "|",
    ]
    for name, vocab in rows():
        cells = " | ".join(cell(simulated[name, vocab, ranks]) for ranks in SIZES)
        lines.append(f"| `{name}` | {vocab} | {cells} |")
    return "\n".join(lines) + "\n"


LIMITS = (4, 4.5, 5, 5.5, 6, 7, 8, 9)


def limit_table() -> str:
    """A Markdown table of the makespans of v-flex schedules, by memory limit."""
    costs = PassCosts(F=1, B=1.9, W=0.7)
    lines = ["| vocabulary | " + " | ".join(f"{limit:g}" for limit in LIMITS) + " |", "|---" * (1 + len(LIMITS)) + "|"]
    for vocab in ("none", "vocab-2"):
        others = {}
        for name in ("v-min", "v-half", "zb-v"):
            found = simulate(generate(name, 8, 24, vocab=vocab, costs=costs), costs)
            others[max(found.peak_activation)] = f" (`{name}` {found.makespan:.1f})"
        cells = []
        for limit in LIMITS:
            found = simulate(generate("v-flex", 8, 24, vocab=vocab, costs=costs, activation_limit=limit), costs)
            cells.append(f"{found.makespan:.1f}{others.get(limit, '')}")
        lines.append(f"| {vocab} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


OFFLOADED = (("1f1b", None), ("zb-v", None), ("v-half", None), ("interleaved", 4), ("gis-h", 4), ("po", 4))
"""The families and chunks in the table of offloading."""


def offload_table() -> str:
    """A Markdown table of makespan and peak memory on device and host, with no, half or all chunks offloaded."""
    costs = PassCosts(other={"copy": 0.75})
    lines = ["| schedule | chunks | none | half | all |", "|---|---|---|---|---|"]
    for name, chunks in OFFLOADED:
        family = FAMILIES[name]
        total = family.chunks_of(chunks)
        cells = []
        for text in ("0", "half", "all"):
            count = chunks_to_offload(text, total)
            found = simulate(generate(name, 8, 32, chunks=chunks, costs=costs, offload_chunks=count), costs)
            host = f" + {max(found.peak_host):.4g}" if count else ""
            cells.append(f"{found.makespan:.2f}, {max(found.peak_activation):.4g}{host}")
        lines.append(f"| `{name}` | {total} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_chart(simulated: dict[tuple[str, str, int], Timeline]) -> None:
    """Draw bubble against memory, with one colour for each schedule that trains and one marker for each vocabulary
    method.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.add_subplot()
    colours = {name: f"C{number}" for number, name in enumerate(PLANNED)}
    for name, vocab in rows():
        if name not in PLANNED:
            continue
        shown = simulated[name, vocab, CHART_SIZE]
        axes.plot(max(shown.peak_activation), 100 * shown.bubble_fraction, MARKERS[vocab], color=colours[name])
    axes.set_xlabel("peak activations of the busiest rank, microbatches")
    axes.set_ylabel("bubble, %")
    axes.set_title(f"{CHART_SIZE} ranks, {MICROBATCHES} microbatches, default costs", loc="left", fontsize=10)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    handles = [Line2D([], [], marker="o", linestyle="", color=colours[name], label=name) for name in PLANNED]
    handles += [Line2D([], [], marker=m, ls="", color="k", mfc="none", label=vocab) for vocab, m in MARKERS.items()]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(PICTURES / "bubble_and_memory.png", dpi=160)


def draw_schedules() -> None:
    """Draw one small picture of each schedule."""
    for name in FAMILIES:
        vocab = FAMILIES[name].own_method or "vocab-2"
        limit = 4 if FAMILIES[name].bases else None
        shown = simulate(generate(name, 4, 8, vocab=vocab, activation_limit=limit))
        (PICTURES / f"{name}.png").write_bytes(to_picture(shown, "png"))
    costs = PassCosts(other={"copy": 0.75})
    offloaded = generate("po", 4, 8, vocab="vocab-2", chunks=4, costs=costs, offload_chunks=2)
    (PICTURES / "po_offloaded.png").write_bytes(to_picture(simulate(offloaded, costs), "png"))


def write_block(page: Path, block: str, fresh: str, check: bool) -> bool:
    """Write a block of a page, unless `check`; return whether it was out of date."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- begin {block} -->\n", f"<!-- end {block} -->\n"
    before, rest = text.split(begin)
    old, after = rest.split(end)
    if not check:
        page.write_text(before + begin + fresh + end + after, encoding="utf-8")
    return old != fresh


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if out of date")
    check = parser.parse_args().check
    simulated = {}
    for name, vocab in rows():
        print(f"{name}, {vocab}", flush=True)
        simulated |= {(name, vocab, ranks): timeline(name, vocab, ranks) for ranks in SIZES}
    blocks = (
        (FIGURES, "figures", table(simulated)),
        (FIGURES, "limit figures", limit_table()),
        (FIGURES, "offload figures", offload_table()),
    )
    old = [page.name for page, block, fresh in blocks if write_block(page, block, fresh, check)]
    if check:
        print(f"out of date; run this script without --check: {', '.join(old)}" if old else "up to date")
        return int(bool(old))
    PICTURES.mkdir(parents=True, exist_ok=True)
    draw_chart(simulated)
    draw_schedules()
    return 0


if __name__ == "__main__":
    sys.exit(main())
