"""Checks plans as training does at startup, so that `megatron-vp plan` recommends only runs that can start."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron_vp.cost.planning.workers import asked_process
from megatron_vp.jobs.command_line import CPU, option_of
from megatron_vp.jobs.known_options import known_options

if TYPE_CHECKING:
    from megatron_vp.cli.planning import Request
    from megatron_vp.cost.planning.evaluation import Evaluation
    from megatron_vp.cost.planning.planner import Choice, Infeasible
    from megatron_vp.cost.sizes.shapes import Plan


UNCHECKED = (
    "this plan was not checked, because Megatron is not installed; run megatron-vp check where Megatron is installed"
)
"""Note for a plan that was not checked with Megatron's argument validation, because Megatron is not installed."""


Ask = Callable[[list[str], int], str | None]
"""Function of a job's arguments and number of ranks; returns why training would refuse the job, or None."""


def refusal_here(words: list[str], ranks: int) -> str | None:
    """Check a job in this process (see `Ask`). The first call takes several seconds, because it loads Megatron."""
    from megatron_vp.mcore.start.preflight import refusal_of

    return refusal_of(words, ranks)


@contextmanager
def megatrons_check() -> Iterator[Ask]:
    """Yield a function that checks jobs in a second process, which loads Megatron while this process predicts.

    If Megatron is already loaded here or is not installed, no second process starts, and the function is
    `refusal_here`.
    """
    if "megatron.training" in sys.modules or not can_check():
        yield refusal_here
        return
    with asked_process(_load_megatron, refusal_here) as ask:
        yield ask


def _load_megatron() -> None:
    from megatron_vp.mcore.start.preflight import load_megatron

    logging.disable(logging.WARNING)  # This process only checks jobs, so the warnings of libraries do not matter.
    load_megatron()


def choose_checked(
    request: Request, evaluations: Sequence[Evaluation], ask: Ask
) -> tuple[Choice, list[Infeasible], str | None]:
    """Choose a plan as `planner.choose` does, but leave out plans that training refuses. Return the choice, the plans
    left out, and a note for the user.

    If training refuses a plan for a reason that also applies to the simplest of all plans, the cause is the job itself.
    Such a plan is kept, and the result's note gives the reason. Raises UserError if `planner.choose` does.
    """
    from megatron_vp.cost.planning.planner import Infeasible, choose, simplicity

    left, band = list(evaluations), request.tie.share
    refused: list[Infeasible] = []
    if not can_check():
        return choose(left, request.limit, band), [], UNCHECKED
    plainest = min(evaluations, key=simplicity).candidate.plan
    check = cache(lambda plan: refusal(request, plan, ask))
    while True:
        choice = choose(left, request.limit, band)
        note = None
        for each in filter(None, (choice.chosen, choice.without_split, choice.in_megatron)):
            reason = check(each.candidate.plan)
            if reason is None:
                continue
            if reason == check(plainest):
                note = f"training would refuse this job under every schedule: {reason}"
                continue
            refused.append(Infeasible(each.candidate, reason))
            left.remove(each)
            break
        else:
            return choice, refused, note


def can_check() -> bool:
    """Return whether Megatron is installed."""
    return (
        importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.training") is not None
    )


def refusal(request: Request, plan: Plan, ask: Ask) -> str | None:
    """Return why training would refuse the job with this plan, or None if training would start."""
    from megatron_vp.cost.sizes.job_plan import settings_of

    words = _words(request.config.values | settings_of(request.config, plan, request.job))
    return ask([*words, CPU] if request.hardware.name == "cpu" else words, request.job.gpus)


def _words(values: dict[str, Any]) -> list[str]:
    """Convert a mapping from argument names to values into command-line words."""
    known, words = known_options(), []
    for name, value in values.items():
        option = option_of(name)
        if name not in known or value is None:
            continue
        if known[name].nargs == 0:
            negative = f"no_{name}"
            words += [option] if value else [option_of(negative)] if negative in known else []
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif known[name].nargs is not None:
            words += [option] if value is True else [option, str(value)]
        else:
            words.append(f"{option}={'' if value is False else value}")
    return words
