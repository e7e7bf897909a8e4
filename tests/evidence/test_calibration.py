"""Test the fit of the constants to the paper's tables."""

from dataclasses import astuple
from statistics import fmean

import pytest

from evidence import calibration
from evidence.calibration import factor_errors, fit, known_cells, known_to_fit, leave_out, pass_errors
from megatron_vp.cost.hardware.constants import ERROR_BAND, FITTED
from megatron_vp.cost.paper.published import Cell


def test_pass_times_and_scaling_factors_are_within_their_bounds():
    for column in pass_errors(FITTED).values():
        assert fmean(map(abs, column)) < 0.025
    assert max(map(abs, factor_errors(FITTED))) < 0.05


def test_cells_are_predicted_by_constants_that_have_not_seen_them(monkeypatch):
    seen = []
    monkeypatch.setattr(calibration, "fit", lambda cells: seen.append(set(cells)) or FITTED)
    eight, sixteen = Cell(5, 8, 2048, "vocab-2", 64), Cell(5, 16, 2048, "vocab-2", 64)
    longer, unknown = sixteen._replace(sequence=4096), sixteen._replace(method="redis")
    parts = [eight.setup, sixteen.setup, (5, 16)]
    found = leave_out({cell: known_cells()[cell] for cell in (eight, sixteen, longer, unknown)}, parts)
    assert seen == [{sixteen, longer, unknown}, {eight, longer}, {eight}]
    assert [(entry.part, entry.cells) for entry in found] == list(zip(parts, (1, 1, 2), strict=True))


@pytest.mark.slow
def test_the_constants_are_what_the_fit_finds_and_carry_over_to_unseen_setups():
    cells = known_to_fit()
    assert astuple(fit(cells)) == pytest.approx(astuple(FITTED), rel=0.02)
    for entry in leave_out(cells, sorted({cell.setup for cell in cells})):
        assert entry.mfu[0] < 2.5 and entry.mfu[1] < 100 * ERROR_BAND["time"]
        assert entry.memory[1] < 100 * ERROR_BAND["memory"]
