"""What a job's arguments choose: its schedule's family, and what follows from that."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES, Costs, Family, VocabMethod, family
from megatron_vp.schedule.families import family_of_text, is_file, text_of_file

ALGORITHMS = tuple(method.value for method in VocabMethod if method.is_sharded)


engine_in_shapes = False
"""Whether this is a replay of shapes in which local layers stand for Transformer Engine's."""


replayed: JobConfig | None = None
"""The whole job of which a replay plays one rank, before the replay's changes to it."""


order: Costs | None = None
"""What the passes of this job are ordered for; None: for FLOPs. All ranks of a run take rank 0's."""


def counts_engine() -> bool:
    """Whether local layers keep what Transformer Engine's would."""
    return engine_in_shapes


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule file as it was at the start: the run never reads it again."""

    family: Family
    digest: str
    """SHA-256 of its text, in hexadecimal digits."""


_files: dict[str, ScheduleFile] = {}
"""By path."""


def read_schedule(name: str, text_of: Callable[[str], str] = text_of_file) -> None:
    """Read the file that a start's --pipeline-schedule names, if it names one; what other starts read is forgotten.

    `text_of` returns a file's text. Raises UserError for a file that cannot be used.
    """
    _files.clear()
    if name not in FAMILIES and is_file(name):
        try:
            _read(name, text_of)
        except UserError as error:
            raise UserError(f"--pipeline-schedule: {error}") from None


def _read(name: str, text_of: Callable[[str], str]) -> ScheduleFile:
    text = text_of(name)
    _files[name] = ScheduleFile(family_of_text(name, text), hashlib.sha256(text.encode()).hexdigest())
    return _files[name]


def schedule_file(name: str) -> ScheduleFile | None:
    """The file of a --pipeline-schedule as it was read first; None where it names a family. Raises UserError."""
    if name in FAMILIES or not is_file(name):
        return None
    return _files.get(name) or _read(name, text_of_file)


def describe_schedule_file(args: argparse.Namespace) -> str | None:
    """The file that this run took its schedule from, in one line; None for a family."""
    file = schedule_file(args.pipeline_schedule)
    return file and f"--pipeline-schedule {args.pipeline_schedule} as it is now (sha256 {file.digest})"


def family_of(name: str) -> Family:
    """The record of a value of --pipeline-schedule. Raises UserError for a name that is neither family nor file."""
    file = schedule_file(name)
    return file.family if file else family(name)


def chosen_family(args: argparse.Namespace) -> Family:
    """The record of --pipeline-schedule. Raises UserError for a name that is none, and a file that cannot be used."""
    try:
        return family_of(args.pipeline_schedule)
    except UserError as error:
        raise UserError(f"--pipeline-schedule: {error}") from None


def replaces_schedule(args: argparse.Namespace) -> bool:
    """Whether the plug-in runs the pipeline. Without either option Megatron does, virtual stages included."""
    return args.vocab_parallel or args.pipeline_schedule != DEFAULT_SCHEDULE


def splits_backward(args: argparse.Namespace) -> bool:
    """Whether some weight gradients are computed in passes of their own."""
    return chosen_family(args).splits_backward


def places_chunks(args: argparse.Namespace) -> bool:
    """Whether chunks are placed otherwise than by Megatron, whose chunk c of rank r is stage c p + r."""
    return not chosen_family(args).in_rounds


def ends_elsewhere(args: argparse.Namespace) -> bool:
    """Whether the last stage is on another rank than p-1."""
    return not chosen_family(args).ends_on_last_rank
