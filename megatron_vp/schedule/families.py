"""Reads the schedule families from `families.toml`; a schedule in a file gets a record of the same form.

To add a family, write its generator and add a record to the table. Code outside the generators must depend on a
record's properties, not on its name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.flex import fitted
from megatron_vp.schedule.formats import from_text
from megatron_vp.schedule.generators.dual_pipe_v import dual_pipe_v, overlapped_dual_pipe_v
from megatron_vp.schedule.generators.grouped import gis, gis_h, po
from megatron_vp.schedule.generators.one_f_one_b import interleaved, one_f_one_b, overlapped_interleaved, zb_h1
from megatron_vp.schedule.generators.v_shapes import v_half, v_min, zb_v
from megatron_vp.schedule.interlaced import interlaced
from megatron_vp.schedule.lowering import check_reading, lower
from megatron_vp.schedule.passes import Schedule, ScheduleError, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.request import ScheduleRequest

DEFAULT_SCHEDULE = "1f1b"


def _read_families() -> dict[str, Family]:
    blocks = (one_f_one_b, interleaved, zb_h1, zb_v, v_half, v_min, dual_pipe_v, gis, gis_h, po)
    makers = (*blocks, interlaced, overlapped_interleaved, overlapped_dual_pipe_v)
    by_name = {each.__name__: each for each in makers}
    found: dict[str, Family] = {}
    meanings: dict[str, Callable[[Any], Any]] = {
        "placement": lambda name: getattr(Placement, name),
        "block": by_name.__getitem__,
        "overlapped": by_name.__getitem__,
        "order": by_name.__getitem__,
        "chunks": lambda number: None if number == "any" else number,
        "methods": lambda names: tuple(map(VocabMethod, names)),
        "bases": lambda name: tuple(each for each in found.values() if each.placement == getattr(Placement, name)),
    }
    for name, record in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        found[name] = Family(
            name, **{key: meanings[key](value) if key in meanings else value for key, value in record.items()}
        )
    return found


FAMILIES = _read_families()


def family(name: str) -> Family:
    """Return the family called `name`, or one for the schedule file `name`. Raises UserError if neither exists, if the
    file cannot be read, or if its schedule cannot run.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if not is_file(name):
        near = difflib.get_close_matches(name, FAMILIES, 1, 0)
        raise UserError(
            f"unknown schedule {name!r}; the nearest name is {near[0]!r}. Use one of {', '.join(FAMILIES)}, or a file "
            "whose name ends in .json or .csv"
        )
    file = Path(name)
    return _of_file(name, file.stat().st_mtime_ns if file.exists() else 0)


def is_file(name: str) -> bool:
    """Whether a value of --pipeline-schedule names a file."""
    return name.endswith((".json", ".csv"))


@lru_cache(maxsize=4)
def _of_file(path: str, changed: int) -> Family:
    """The `Family` of a file, unless the cache has it for this path and modification time (`changed`, in ns)."""
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
    return Family(
        path,
        f"the schedule in {path}",
        "as in the file",
        lambda ranks, chunks: schedule.placement,
        chunks=schedule.chunks,
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
