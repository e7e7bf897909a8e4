"""Test our makespans against the shortest possible: stored results, solved again if OR-tools is installed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, ScheduleError, ScheduleRequest, generate, simulate
from megatron_vp.schedule.families import PLANNED
from megatron_vp.schedule.list_scheduler import MemoryLimits

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


def test_solving_without_or_tools_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.delitem(sys.modules, "exact_schedules", raising=False)
    with pytest.raises(SystemExit, match=r"pip install 'megatron_vp\[optimality\]'"):
        optimality.solve(SOLVED_AGAIN[0], 1.0)


@pytest.mark.parametrize("case", SOLVED_AGAIN, ids=lambda case: f"{case.name}-{case.costs_name}")
def test_the_solver_finds_the_committed_makespans(case):
    pytest.importorskip("ortools", reason="OR-tools is not installed: pip install 'megatron_vp[optimality]'")
    committed, found = read_results()[case], optimality.solve(case, 10.0)
    assert found["proven"]
    assert found["shortest"] == pytest.approx(committed["shortest"])
    assert all(peak <= limit for peak, limit in zip(found["shortest_peak"], found["memory_limit"], strict=True))


def test_the_model_knows_1f1b_and_its_memory():
    pytest.importorskip("ortools", reason="OR-tools is not installed: pip install 'megatron_vp[optimality]'")
    from exact_schedules import shortest

    costs, p, m = PassCosts(), 3, 4
    schedule = generate("1f1b", p, m)
    peaks = ScheduleRequest.of(FAMILIES["1f1b"], p, m).promised_peaks
    found = shortest(schedule, MemoryLimits(peaks), (), costs, 5.0)
    assert found.proven and found.makespan == pytest.approx((m + p - 1) * 3)
    # One microbatch at a time: nothing overlaps.
    serial = replace(
        schedule, ranks=tuple(tuple(sorted(order, key=lambda s: s.microbatch)) for order in schedule.ranks)
    )
    alone = shortest(serial, MemoryLimits((1,) * p), (), costs, 5.0)
    assert alone.proven and alone.makespan == pytest.approx(simulate(serial, costs).makespan) == pytest.approx(
        m * 3 * p
    )


def test_an_order_that_breaks_the_limits_is_refused(monkeypatch):
    pytest.importorskip("ortools", reason="OR-tools is not installed: pip install 'megatron_vp[optimality]'")
    import exact_schedules

    monkeypatch.setattr(exact_schedules._Model, "limit_memory", lambda *_: None)
    schedule = generate("zb-v", 2, 6)
    with pytest.raises(ScheduleError, match="more than its bound"):
        exact_schedules.shortest(schedule, MemoryLimits((2, 2)), (), PassCosts(), 5.0)
