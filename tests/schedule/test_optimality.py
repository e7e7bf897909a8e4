"""Test our makespans against the shortest possible: stored results, solved again if OR-tools is installed."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from optimality import PLANNED, cases, most, ratio, read_results


def test_every_case_is_solved():
    assert set(read_results()) == set(cases())


@pytest.mark.parametrize("name", PLANNED)
def test_no_schedule_takes_more_than_2_percent_over_the_shortest(name):
    ratios = {case: ratio(case, result) for case, result in read_results().items() if case.name == name}
    assert len(ratios) >= 7
    for case, found in ratios.items():
        assert 1 - 1e-6 <= found <= most(case), case
