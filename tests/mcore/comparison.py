"""Compare two runs: losses, gradient norms, and every parameter's gradient in every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.harness.training import Run


def assert_equal(found: Run, expected: Run, bound: float) -> None:
    """Every number of every step and evaluation within a relative distance; a gradient's is that of its norm."""
    assert len(found.steps) == len(expected.steps) > 0
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert len(ours.microbatches) == len(theirs.microbatches) > 0
        np.testing.assert_allclose(ours.microbatches, theirs.microbatches, rtol=bound, err_msg=f"step {number}")
        assert ours.loss == pytest.approx(theirs.loss, rel=bound)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=bound)
        assert ours.gradients.keys() == theirs.gradients.keys()
    for number, name, distance in _gradient_distances(found, expected):
        assert distance <= bound, f"gradient of {name} in step {number}: {distance:.2e}"
    assert len(found.evaluations) == len(expected.evaluations) > 0
    for ours, theirs in zip(found.evaluations, expected.evaluations, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=bound)


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same arrays under the same names."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_as_close(found: Run, plain: Run, exact: Run) -> None:
    """Half precision: as close to `exact`, a run in fp32, as `plain`, whose rounding is the yardstick.

    Two plain runs that differ in p agree in every bit, so they give none.
    """
    assert [step.loss is None for step in found.steps] == [step.loss is None for step in plain.steps]
    taken = [number for number, step in enumerate(plain.steps) if step.loss is not None]
    assert taken
    rounding = max(abs(plain.steps[number].loss - exact.steps[number].loss) for number in taken)
    for number in taken:
        assert abs(found.steps[number].loss - exact.steps[number].loss) <= 1.1 * rounding, f"step {number}"
    plain_distance = largest_distance(plain, exact)
    assert largest_distance(found, exact) <= 1.15 * plain_distance
    # And the two are no further apart than two independent roundings.
    assert largest_distance(found, plain) <= 1.42 * plain_distance


def largest_distance(found: Run, expected: Run) -> float:
    """The largest relative distance of a parameter's gradient in any step that updated the weights."""
    return max(distance for _, _, distance in _gradient_distances(found, expected))


def _gradient_distances(found: Run, expected: Run) -> Iterator[tuple[int, str, float]]:
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        if ours.loss is None:
            continue
        for name, gradient in theirs.gradients.items():
            # An expert that no token chose has a gradient of zero.
            yield number, name, np.linalg.norm(ours.gradients[name] - gradient) / (np.linalg.norm(gradient) or 1.0)
