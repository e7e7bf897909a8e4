"""Checks `--pipeline-trace` and `--pipeline-trace-iterations`. This module does not import Megatron."""

from __future__ import annotations

from pathlib import Path

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments


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


def check_trace_iterations(args: Arguments) -> None:
    """Raise UserError if the range of iterations is invalid or begins after the last iteration of the run."""
    iterations = iterations_in(args.pipeline_trace_iterations)
    if args.pipeline_trace is not None and args.train_iters is not None and iterations[0] > args.train_iters:
        raise UserError(
            f"--pipeline-trace-iterations {args.pipeline_trace_iterations} begins after the last iteration "
            f"(--train-iters {args.train_iters}): choose earlier iterations"
        )


def make_trace_folder(args: Arguments) -> None:
    """Create the folder that `--pipeline-trace` names. Raises UserError if the folder cannot be created."""
    try:
        if args.pipeline_trace is not None:
            Path(args.pipeline_trace).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create the --pipeline-trace folder {args.pipeline_trace} ({error.strerror}): choose another folder"
        ) from None
