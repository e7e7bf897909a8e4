"""Fits the H100's constants to published runs, and computes the errors on runs that a fit left out.

Errors are almost linear in small changes of the constants' logarithms. The constants are therefore changed slightly,
one at a time, and all fits are computed from the resulting slopes (one Gauss-Newton step). Runs of one model that
differ mainly in the number of GPUs form one family and are left out together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evidence.comparison import GroupError, group_errors, predicted
from evidence.public_rows import PublicRow, read_rows
from megatron_vp.cost.hardware.gpus import Hardware, Rates, find_hardware
from megatron_vp.cost.planning.workers import worker_pool

MOVED = 0.02
"""Each constant is changed by this fraction to measure how the errors depend on it."""

SPREAD, UNKNOWN, NOISE = 0.05, 0.3, 0.06
"""Standard deviations of the prior for the logarithm of a constant that others measured and of one that nobody did,
and of the logarithmic error that a run would have even with exact constants.
"""

NINETY = 1.645
"""Half-width of a 90 percent interval in standard errors."""


@dataclass(frozen=True)
class Varied:
    """A constant that is fitted; `times` returns the hardware with this constant multiplied by a factor. `spread` is
    the standard deviation of the prior for its logarithm.
    """

    name: str
    value: Callable[[Hardware], float]
    unit: str
    times: Callable[[Hardware, float], Hardware]
    spread: float = SPREAD


def _of_rates(name: str, scale: float, unit: str, spread: float = SPREAD) -> Varied:
    def times(hardware: Hardware, factor: float) -> Hardware:
        return _with_rates(hardware, **{name: getattr(_rates(hardware), name) * factor})

    return Varied(name, lambda hardware: getattr(_rates(hardware), name) / scale, unit, times, spread)


def _nominal(name: str) -> Varied:
    def times(hardware: Hardware, factor: float) -> Hardware:
        changed: dict[str, Any] = {name: getattr(hardware, name) * factor}
        return replace(hardware, **changed)

    return Varied(name, lambda hardware: getattr(hardware, name) / 1e9, "GB/s", times)


def _attention(hardware: Hardware, factor: float) -> Hardware:
    forward, backward = _rates(hardware).attention or (0.0, 0.0)
    return _with_rates(hardware, attention=(forward * factor, backward * factor))


def _with_rates(hardware: Hardware, **changes: Any) -> Hardware:
    return replace(hardware, rates=replace(_rates(hardware), **changes))


def _rates(hardware: Hardware) -> Rates:
    assert hardware.rates is not None
    return hardware.rates


VARIED = (
    _of_rates("gemm", 1e12, "TFLOP/s"),
    _of_rates("fp8_gemm", 1e12, "TFLOP/s"),
    Varied("attention", lambda hardware: (_rates(hardware).attention or (0.0,))[0], "of the peak, forward", _attention),
    _nominal("memory_bandwidth"),
    _nominal("link_bandwidth"),
    _nominal("network_bandwidth"),
    _of_rates("launches", 1e-3, "ms", UNKNOWN),
    _of_rates("product", 1e-6, "us", UNKNOWN),
    _of_rates("all_to_all", 1, "of the bandwidth", UNKNOWN),
)
"""The constants that affect predictions most. Scaling a bandwidth has the same effect as scaling its efficiency."""


@dataclass(frozen=True)
class Interval:
    """A constant's value, and its 90 percent interval from fits that leave out one family of runs at a time."""

    name: str
    unit: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PublicFit:
    """The result of fitting the constants to published runs.

    Errors are given for each `PublicRow.group`.

    present: errors with the current constants.
    fitted: errors with constants fitted to all runs.
    left_out: errors when each family of runs is predicted with constants fitted to all other families.
    """

    runs: int
    families: int
    intervals: list[Interval]
    present: list[GroupError]
    fitted: list[GroupError]
    left_out: list[GroupError]


def fit_to_public_runs(tick: Callable[[int, int], None] = lambda done, of: None, processes: int = 1) -> PublicFit:
    """Fit the constants to all `judged` runs on H100. `tick` is called with the number of finished predictions and the
    total.
    """
    rows = [row for row in read_rows() if row.judged and row["gpu"] == "h100"]
    hardware = find_hardware("h100")
    settings = [hardware, *(each.times(hardware, 1 + MOVED) for each in VARIED)]
    logarithms = np.zeros((len(settings), len(rows)))
    with worker_pool(processes) as pool:
        running = {
            pool.submit(_error, row, setting): (index, number)
            for index, setting in enumerate(settings)
            for number, row in enumerate(rows)
        }
        for done, future in enumerate(as_completed(running), 1):
            logarithms[running[future]] = future.result()
            tick(done, len(running))
    slopes = (logarithms[1:] - logarithms[0]).T / math.log1p(MOVED)
    return fit_of(rows, logarithms[0], slopes, hardware)


def _error(row: PublicRow, hardware: Hardware) -> float:
    """Logarithm of the ratio of predicted to published throughput."""
    error = predicted(row, hardware).error
    assert error is not None, f"{row['id']} is refused"
    return math.log1p(error)


def fit_of(rows: Sequence[PublicRow], errors: np.ndarray, slopes: np.ndarray, hardware: Hardware) -> PublicFit:
    """Fit the constants to the errors of all rows, as `_error` returns them.

    `slopes`: derivatives of the errors with respect to the logarithms of the constants.
    """
    families = sorted({row["family"] for row in rows})
    whole = _solved(errors, slopes)
    left_out, moves = np.zeros(len(rows)), []
    for family in families:
        inside = np.array([row["family"] == family for row in rows])
        moved = _solved(errors[~inside], slopes[~inside])
        left_out[inside] = (errors + slopes @ moved)[inside]
        moves.append(moved)
    deviation = np.array(moves) - np.mean(moves, axis=0)
    spread = NINETY * np.sqrt((len(families) - 1) / len(families) * np.sum(deviation**2, axis=0))
    intervals = [
        Interval(each.name, each.unit, value, value * math.exp(move - around), value * math.exp(move + around))
        for each, move, around in zip(VARIED, whole, spread, strict=True)
        for value in [each.value(hardware)]
    ]

    def grouped(found: np.ndarray) -> list[GroupError]:
        return group_errors((row.group, math.expm1(error)) for row, error in zip(rows, found, strict=True))

    return PublicFit(
        len(rows), len(families), intervals, grouped(errors), grouped(errors + slopes @ whole), grouped(left_out)
    )


def _solved(errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """The changes of the constants' logarithms that minimise the squared errors, given a normal prior with mean 0."""
    spreads = [each.spread for each in VARIED]
    equations = np.vstack([slopes / NOISE, np.diag(1 / np.array(spreads))])
    return np.linalg.lstsq(equations, np.concatenate([-errors / NOISE, np.zeros(len(spreads))]), rcond=None)[0]
