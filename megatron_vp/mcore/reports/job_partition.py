"""Reads the layers of stages from a job's layout, and the iterations that --pipeline-trace records."""

from __future__ import annotations

from contextlib import suppress

from megatron_vp.errors import UserError
from megatron_vp.jobs import virtual_stages
from megatron_vp.jobs.known_options import Arguments


def layers_given(args: Arguments) -> tuple[int, ...] | None:
    """As `virtual_stages.layers_given`, but None for a layout that only Megatron can parse."""
    with suppress(UserError):
        return virtual_stages.layers_given(vars(args))
    return None


def iterations_in(text: str) -> range:
    """Parse a range of iterations, such as `3-5`, or `4` for a single iteration. Raises UserError."""
    first, _, last = text.partition("-")
    try:
        iterations = range(int(first), int(last or first) + 1)
    except ValueError:
        iterations = range(0)
    if not iterations or iterations[0] < 1:
        raise UserError(
            f"--pipeline-trace-iterations {text} is not a range of iterations: give A-B with 1 <= A <= B, such as 3-5"
        )
    return iterations
