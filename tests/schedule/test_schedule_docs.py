"""Test that the figures in the documentation are those of the code."""

import importlib.util
import inspect
from pathlib import Path

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, family, from_csv, generate, simulate
from megatron_vp.schedule.generators.v_shapes import v_flex
from megatron_vp.schedule.validate import validate

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("schedule_figures", ROOT / "scripts" / "schedule_figures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.slow
def test_the_page_shows_the_present_figures():
    script = load_script()
    page = script.FIGURES.read_text(encoding="utf-8").splitlines()
    for name, vocab in script.rows():
        (line,) = [line for line in page if line.startswith(f"| `{name}` | {vocab} |")]
        ranks = script.SIZES[0]
        assert line.split(" | ")[2] == script.cell(script.timeline(name, vocab, ranks)), (name, vocab)


@pytest.mark.slow
def test_the_page_shows_what_a_limit_costs(monkeypatch):
    script = load_script()
    page = script.FIGURES.read_text(encoding="utf-8").split("<!-- begin limit figures -->")[1]
    monkeypatch.setattr(script, "LIMITS", (5,))
    for line in script.limit_table().splitlines()[2:]:
        vocab, cell = line.strip("| ").split(" | ")
        (row,) = [each for each in page.splitlines() if each.startswith(f"| {vocab} |")]
        assert f"| {cell} |" in row


@pytest.mark.slow
def test_the_page_shows_what_offloading_leaves():
    script = load_script()
    assert not script.write_block(script.FIGURES, "offload figures", script.offload_table(), check=True)


def test_the_schedule_written_by_hand_runs():
    page = (ROOT / "docs" / "reference" / "schedule_formats.md").read_text(encoding="utf-8")
    assert validate(from_csv(page.split("```text\n")[1].split("```")[0])).makespan == 9


def to_slots(timeline):
    """Draw one line per rank, with one cell per unit of time.

    `F2` is F of microbatch 2 in chunk 0, and `f2` is F of microbatch 2 in any other chunk. Dashes continue a longer
    pass; dots are idle time. This drawing is meant for few microbatches and integer durations.
    """
    lines = []
    for rank, (order, spans) in enumerate(zip(timeline.schedule.ranks, timeline.spans, strict=True)):
        cells = [".."] * round(timeline.makespan)
        for step, (start, end) in zip(order, spans, strict=True):
            cells[round(start) : round(end)] = ["--"] * (round(end) - round(start))
            if end > start:
                mark = step.kind[0].lower() if step.chunk else step.kind[0]
                cells[round(start)] = f"{mark}{step.microbatch}"
        lines.append(f"rank {rank}  {''.join(cells)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_docstring_shows_the_order_and_numbers_its_phases(name):
    chunks, limit = family(name).chunks_of(None), 3.5 if name == "v-flex" else None
    costs = PassCosts(F=chunks, B=chunks, W=chunks, S=1, T=0, IF=0, IB=0)
    drawn = to_slots(simulate(generate(name, 4, 5, costs=costs, activation_limit=limit), costs))
    generator = v_flex if name == "v-flex" else family(name).block or family(name).order
    said = inspect.getdoc(generator).splitlines()
    assert [line.strip() for line in said if line.strip().startswith("rank ")] == drawn.splitlines()
    assert [line[:3] for line in said if line[1:3] == ". "] == ["1. ", "2. ", "3. "]
