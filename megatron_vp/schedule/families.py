"""The schedule families: one record for each, with all the properties that code outside the generators uses.

To add a family, write its generator and add a record to FAMILIES. A schedule in a file gets a record of the same form.
Code outside the generators must depend on a record's properties, not on its name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.flex import fitted
from megatron_vp.schedule.formats import from_text
from megatron_vp.schedule.generators.dual_pipe_v import dual_pipe_v
from megatron_vp.schedule.generators.grouped import gis, gis_h, po
from megatron_vp.schedule.generators.interlaced import interlaced
from megatron_vp.schedule.generators.one_f_one_b import interleaved, one_f_one_b, zb_h1
from megatron_vp.schedule.generators.v_shapes import v_half, v_min, zb_v
from megatron_vp.schedule.ledger import peak
from megatron_vp.schedule.lowering import check_reading, lower
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule, ScheduleError, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.request import ScheduleRequest

DEFAULT_SCHEDULE = "1f1b"


def _with_v_flex(families: Iterable[Family]) -> dict[str, Family]:
    """Add v-flex, which can be fitted to memory limits between the peaks of the V-shaped families."""
    found = {family.name: family for family in families}
    bases = tuple(found[name] for name in ("zb-v", "v-half", "v-min"))
    summary = "V shape, shortest schedule within --activation-limit; without this option, the same as zb-v"
    flexible = replace(bases[0], name="v-flex", summary=summary, bases=bases, planned=False)
    return found | {flexible.name: flexible}


def _v_shape(pipeline_size: int, chunks: int) -> Placement:
    return Placement.v_shape(pipeline_size)


FAMILIES = _with_v_flex(
    (
        Family(
            DEFAULT_SCHEDULE,
            "one forward, one backward; Megatron's default",
            Placement.round_robin,
            lambda p, r, v, m: p - r,
            "p - r",
            block=one_f_one_b,
            in_megatron=True,
        ),
        Family(
            "interleaved",
            "1F1B with several round-robin chunks per rank",
            Placement.round_robin,
            lambda p, r, v, m: 2 * (p - 1 - r) + (v - 1) * p + 1,
            "(2(p - 1 - r) + (v - 1)p + 1)/v",
            block=interleaved,
            chunks=None,
            in_megatron=True,
        ),
        Family(
            "zb-h1",
            "1F1B with the backward split, W in the cool-down",
            Placement.round_robin,
            lambda p, r, v, m: p,
            "p",
            block=zb_h1,
            splits_backward=True,
        ),
        Family(
            "zb-v",
            "V shape, 1F1B's peak activations, almost no bubble",
            _v_shape,
            lambda p, r, v, m: 2 * p,
            "p",
            block=zb_v,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "v-half",
            "V shape, about half of 1F1B's peak activations",
            _v_shape,
            lambda p, r, v, m: 2 * (p // 2 + 1),
            "floor(p/2) + 1",
            block=v_half,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "v-min",
            "V shape, about a third of 1F1B's peak activations",
            _v_shape,
            lambda p, r, v, m: 2 * ((p + 4) // 3),
            "ceil((p + 2)/3)",
            block=v_min,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "interlaced",
            "1F1B with one synchronous vocabulary pass",
            Placement.round_robin,
            lambda p, r, v, m: 3 * p // 2 - r,
            "floor(1.5 p) - r",
            order=interlaced,
            methods=(VocabMethod.INTERLACED,),
        ),
        Family(
            "dualpipe-v",
            "V shape, forwards paired with unsplit backwards",
            _v_shape,
            lambda p, r, v, m: 2 * p + 1,
            "p + 1/2",
            block=dual_pipe_v,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "gis",
            "interleaved 1F1B with a split backward and 1F1B's peak activations",
            Placement.round_robin,
            lambda p, r, v, m: p * v - r,
            "((v - 1)p + p - r)/v",
            block=gis,
            chunks=None,
            splits_backward=True,
            planned=False,
        ),
        Family(
            "gis-h",
            "interleaved 1F1B with a split backward and about 1/2 to 3/4 of 1F1B's peak activations",
            Placement.round_robin,
            lambda p, r, v, m: (p + 1) // 2 * (v - 1) + p - r,
            "(ceil(p/2)(v - 1) + p - r)/v",
            block=gis_h,
            chunks=None,
            splits_backward=True,
            planned=False,
        ),
        Family(
            "po",
            "like gis-h, but takes microbatches one by one instead of in groups",
            Placement.round_robin,
            lambda p, r, v, m: (p + 1) // 2 * (v - 1) + p - r + math.gcd(v, (p + 1) // 2) - 1,
            "(ceil(p/2)(v - 1) + p - r + gcd(v, ceil(p/2)) - 1)/v",
            block=po,
            chunks=None,
            splits_backward=True,
            planned=False,
        ),
    )
)

PLANNED = tuple(name for name, family in FAMILIES.items() if family.planned)


def family(name: str) -> Family:
    """Return the family called `name`, or one for the schedule file `name`. Raises UserError if neither exists."""
    if name not in FAMILIES and is_file(name):
        return family_of_file(name)
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, 1, 0)
        raise UserError(
            f"unknown schedule {name!r}; the nearest name is {near[0]!r}. Use one of {', '.join(FAMILIES)}, or a file "
            "whose name ends in .json or .csv"
        )
    return FAMILIES[name]


def is_file(name: str) -> bool:
    """Whether a value of --pipeline-schedule names a file."""
    return name.endswith((".json", ".csv"))


def family_of_file(path: str) -> Family:
    """A `Family` for the schedule in a file. Raises UserError if the file cannot be read or the schedule cannot run."""
    file = Path(path)
    about = file.stat() if file.exists() else None
    return _read(path, about and about.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: str, changed: int | None) -> Family:
    """Read a file's `Family`, unless the cache has it for this path and modification time (`changed`, in ns)."""
    return family_of_text(path, text_of_file(path))


def text_of_file(path: str) -> str:
    """The contents of a schedule file. Raises UserError if the file cannot be read."""
    return read_text(Path(path), "schedule file", 512 * MIB)


def schedule_of_text(path: str, text: str) -> Schedule:
    """Read a schedule from the text of the file `path`. Raises UserError that names the file."""
    try:
        return from_text(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def family_of_text(path: str, text: str) -> Family:
    """Return the `Family` of the schedule in `text`. Raises UserError if the schedule is malformed or cannot run."""
    schedule = replace(schedule_of_text(path, text), name=path)
    try:
        check_reading(lower(schedule))
    except ScheduleError as error:
        raise UserError(f"the schedule in {path} cannot run: {error}") from None
    placement = schedule.placement
    return Family(
        path,
        f"the schedule in {path}",
        lambda ranks, chunks: placement,
        lambda p, r, v, m: peak(schedule.ranks[r], Held.ACTIVATIONS),
        "as in the file",
        chunks=placement.chunks,
        methods=(schedule.vocab,),
        splits_backward=schedule.split_backward,
        fixed=schedule,
    )


def megatrons_own(chunks: int | None = None) -> Family:
    """The family of the schedule that Megatron runs with this number of chunks per rank."""
    several = (chunks or 1) > 1
    return next(each for each in FAMILIES.values() if each.in_megatron and (each.chunks is None) == several)


def generate(
    name: str,
    pipeline_size: int,
    microbatches: int,
    *,
    vocab: VocabMethod | str = VocabMethod.NONE,
    activation_limit: float | None = None,
    **more: Any,
) -> Schedule:
    """Generate a schedule of the family or file called `name`; `more` are the other arguments of `ScheduleRequest.of`.

    `activation_limit` is the memory limit of a flexible family, in units of one microbatch's activations on a rank.
    Raises UserError for an unknown family or vocabulary method, and in the cases listed by `ScheduleRequest` and
    `fitted`.
    """
    request = ScheduleRequest.of(family(name), pipeline_size, microbatches, method=VocabMethod(vocab), **more)
    if activation_limit is not None:
        request = replace(request, family=fitted(request, activation_limit))
    return request.schedule()
