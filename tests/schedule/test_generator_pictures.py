"""Test that the picture in every generator's docstring shows the order that the generator makes."""

import inspect

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, family, generate, simulate
from megatron_vp.schedule.generators.v_shapes import _v_flex


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
                mark = step.kind.mark.lower() if step.chunk else step.kind.mark
                cells[round(start)] = f"{mark}{step.microbatch}"
        lines.append(f"rank {rank}  {''.join(cells)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_docstring_shows_the_order_and_numbers_its_phases(name):
    chunks, limit = family(name).chunks_of(None), 3.5 if name == "v-flex" else None
    costs = PassCosts(F=chunks, B=chunks, W=chunks, S=1, T=0, IF=0, IB=0)
    drawn = to_slots(simulate(generate(name, 4, 5, costs=costs, activation_limit=limit), costs))
    generator = _v_flex if name == "v-flex" else family(name).block or family(name).order
    said = inspect.getdoc(generator).splitlines()
    assert [line.strip() for line in said if line.strip().startswith("rank ")] == drawn.splitlines()
    assert [line[:3] for line in said if line[1:3] == ". "] == ["1. ", "2. ", "3. "]


def test_slots_show_what_takes_several_units():
    costs = PassCosts(F=2, B=1, W=1)
    drawn = to_slots(simulate(generate("1f1b", 2, 1, costs=costs), costs))
    assert drawn == "rank 0  F0--........B0--\nrank 1  ....F0--B0--....\n"
