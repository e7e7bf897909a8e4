"""Test our makespans against the shortest possible: stored results, solved again if OR-tools is installed."""

import sys
from pathlib import Path

import pytest

from megatron_vp.schedule.families import PLANNED

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import optimality
from optimality import Case, cases, most, ratio, read_results, table

SOLVED_AGAIN = [
    Case("1f1b", "vocab-2", 3, 6, "equal"),
    Case("zb-v", "vocab-2", 2, 8, "communication"),
    Case("zb-h1", "vocab-1", 3, 6, "few holders"),
    Case("interlaced", "interlaced", 3, 6, "uneven"),
    Case("dualpipe-v", "none", 3, 6, "equal"),
]


def test_every_case_is_solved():
    assert set(read_results()) == set(cases())


@pytest.mark.parametrize("name", PLANNED)
def test_no_schedule_takes_more_than_2_percent_over_the_shortest(name):
    ratios = {case: ratio(case, result) for case, result in read_results().items() if case.name == name}
    assert len(ratios) >= 7
    for case, found in ratios.items():
        assert 1 - 1e-6 <= found <= most(case), case


def test_the_table_has_every_family_that_is_planned():
    rows = [line for line in table(read_results()).splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} >= set(PLANNED)


@pytest.mark.parametrize("case", SOLVED_AGAIN, ids=lambda case: f"{case.name}-{case.costs_name}")
def test_the_solver_finds_the_committed_makespans(case):
    pytest.importorskip("ortools", reason="OR-tools is not installed: pip install 'megatron_vp[optimality]'")
    committed, found = read_results()[case], optimality.solve(case, 10.0)
    assert found["proven"]
    assert found["shortest"] == pytest.approx(committed["shortest"])
    assert all(peak <= limit for peak, limit in zip(found["shortest_peak"], found["memory_limit"], strict=True))
