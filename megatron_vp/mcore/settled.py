"""The settled job of this process: the value that everything else uses, and the one place that holds it.

A start goes through these steps, in this order:

1. `begin` reads the schedule file, if one is named (`start/launch.py`).
2. The parser notes the words of the command line (`options/arguments.py`).
3. `options/settle.py` validates the arguments and makes the `SettledJob`.
4. With process groups, all ranks take rank 0's order costs (`start/same_job.py`).

Functions of ours that Megatron calls ask `current()` and hand the job on. This module imports no Megatron.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.jobs.pattern_text import Pattern, pattern_in
from megatron_vp.mcore.platform.installed import Installed
from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES, Costs, Family, Placement, VocabMethod, family
from megatron_vp.schedule.families import family_of_text, is_file, megatrons_own, text_of_file
from megatron_vp.schedule.request import chunks_to_offload

ALGORITHMS = tuple(method.value for method in VocabMethod if method.is_sharded)


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule file as it was at the start: the run never reads it again."""

    family: Family
    digest: str
    """SHA-256 of its text, in hexadecimal digits."""


@dataclass(frozen=True)
class Words:
    """The arguments as typed for this run."""

    all: tuple[str, ...] = ()
    """The words of the command line, after those of configuration files and those added for the platform."""
    platform_flags: tuple[str, ...] = ()
    """Megatron's flags that were added for the platform."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options in `all`, by the names of their arguments."""


@dataclass(frozen=True)
class Replay:
    """Settings of a replay of one rank that its arguments do not hold."""

    job: JobConfig | None = None
    """The whole job, before the replay's changes to it."""
    meter: Any = None
    """In a replay of shapes, the counter of memory: a `reports.memory.Meter`."""
    counts_engine: bool = False
    """Local layers keep what Transformer Engine's would."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run from --pipeline-schedule and --vocab-parallel. Arguments need not be validated."""

    family: Family
    """Family of the schedule, or of the schedule file."""
    file: ScheduleFile | None
    vocab_parallel: bool
    offload: str = "0"
    """The value of --offload-chunks."""

    @property
    def replaces_schedule(self) -> bool:
        """Whether the plug-in runs the pipeline. Without these options Megatron does, virtual stages included."""
        return self.vocab_parallel or self.family.name != DEFAULT_SCHEDULE or self.offload != "0"

    @property
    def offloads(self) -> bool:
        """Whether activations of some chunks wait in the host's memory between forward and backward."""
        return self.offload != "0" or bool(self.family.fixed and self.family.fixed.offloaded)

    def offload_chunks(self, chunks: int) -> int:
        """Number of offloaded chunks out of `chunks` per rank, if no schedule file says it."""
        return chunks_to_offload(self.offload, chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are computed in passes of their own."""
        return self.family.splits_backward

    @property
    def places_chunks(self) -> bool:
        """Whether chunks are placed otherwise than by Megatron, whose chunk c of rank r is stage c p + r."""
        return not self.family.in_rounds

    @property
    def last_stage_elsewhere(self) -> bool:
        """Whether the last stage is on another rank than p-1."""
        return not self.family.ends_on_last_rank

    def placement(self, ranks: int, chunks: int) -> Placement:
        """Which virtual stage each chunk of each of `ranks` pipeline ranks is."""
        if not self.replaces_schedule:
            return Placement.round_robin(ranks, chunks)
        return self.family.placement_of(ranks, chunks)


@dataclass(frozen=True)
class GivenLayout:
    """How the user's arguments cut the model into stages, before a schedule or balanced shards changed it."""

    layout: str | None
    pattern: Pattern | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> GivenLayout:
        """Read it from parsed arguments that nothing was derived from yet."""
        return cls(args.pipeline_model_parallel_layout, pattern_in(vars(args)))


@dataclass(frozen=True)
class ChosenRows:
    """The vocabulary rows of a job, and other choices that come with them."""

    rows: tuple[int, ...] | None = None
    """By pipeline rank, the tensor ranks of a stage together; None for equal shards."""
    reason: str | None = None
    """The reason for these rows if the user did not give them; None for equal shards that need no reason."""
    layout: str | None = None
    """A layout that comes with the rows (for a hybrid model a pattern with bars); None keeps the user's."""


@dataclass(frozen=True)
class SettledJob:
    """Everything that the plug-in has decided for a run."""

    args: argparse.Namespace
    """Megatron's validated arguments. It is Megatron's own object: training changes some of them."""
    settings: RunSettings
    given: GivenLayout
    shards: ChosenRows
    order: Costs | None
    """The costs that the passes are ordered for; None: `PassCosts()`. All ranks of a run take rank 0's."""
    parts: Mapping[str, str]
    """What computes the layers, the norms and so on: see `platform.parts`."""
    words: Words
    nodes: Installed | None
    """The packages of the nodes, if the job was checked for other nodes than this machine."""
    checkpoint_to_load: str | None = None
    """Directory of the checkpoint; None if the run starts afresh, or if none is checked."""

    @property
    def method(self) -> VocabMethod:
        """Method of the vocabulary layers, unless the schedule has its own."""
        return VocabMethod(self.args.vocab_parallel_algorithm if self.settings.vocab_parallel else VocabMethod.NONE)

    @property
    def placement(self) -> Placement:
        """Which virtual stage each chunk of each pipeline rank is."""
        chunks = self.args.virtual_pipeline_model_parallel_size or 1
        return self.settings.placement(self.args.pipeline_model_parallel_size, chunks)


class OwnLoop(Protocol):
    """The settings that `megatron_vp.enable` offers to scripts whose arguments Megatron does not parse."""

    words: tuple[str, ...]
    """The call's settings as words of a command line."""

    def reads_arguments(self) -> bool:
        """Whether Megatron's own arguments have settled the job: its builders prepare the model then."""

    def settle_for(self, model: Mapping[str, Any]) -> SettledJob:
        """Settle the job with the arguments of a model's constructor, by their names; later models take the same."""


class _Process:
    """The state of this process's job."""

    def __init__(self) -> None:
        self.replay = Replay()
        self.own_loop: OwnLoop | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the job, but keep that this is a replay."""
        self.files: dict[str, ScheduleFile] = {}
        self.words = Words()
        self.job: SettledJob | None = None


_process = _Process()


def begin(schedule: str, text_of: Callable[[str], str] = text_of_file) -> None:
    """Begin a start: forget any earlier job, and read the schedule file if --pipeline-schedule names one.

    `text_of` returns a file's text. Raises UserError for a file that cannot be used.
    """
    clear()
    if _names_file(schedule):
        with _named():
            _read(schedule, text_of)


def note_words(words: Words) -> None:
    """Note what was typed, once it has been parsed."""
    _process.words = words


def words() -> Words:
    """The arguments as typed, before parsing."""
    return _process.words


def settle(job: SettledJob) -> None:
    """Make `job` the settled job of this process."""
    _process.job = job


def current() -> SettledJob:
    """The job of this process."""
    assert _process.job is not None, "a function of ours was called before Megatron's arguments were validated"
    return _process.job


@contextmanager
def placed_as_megatron() -> Iterator[None]:
    """Inside, chunks are placed as in plain Megatron, so that the same chunks are built."""
    job = current()
    settle(replace(job, settings=replace(job.settings, family=megatrons_own())))
    try:
        yield
    finally:
        settle(job)


def is_settled() -> bool:
    """Whether this process has a job."""
    return _process.job is not None


def own_loop() -> OwnLoop | None:
    """The arguments of the call of `megatron_vp.enable`; None without such a call."""
    return _process.own_loop


def note_own_loop(own_loop: OwnLoop | None) -> None:
    """Note a call of `megatron_vp.enable`, or that it is undone."""
    _process.own_loop = own_loop


def clear() -> None:
    """Forget the job of this process."""
    _process.clear()


@contextmanager
def replaying(**changes: Any) -> Iterator[None]:
    """Inside, this process replays a rank; `changes` are fields of `Replay`."""
    before = _process.replay
    _process.replay = replace(before, **changes)
    try:
        yield
    finally:
        _process.replay = before


def replay() -> Replay:
    """The settings of the replay in this process; none in a run."""
    return _process.replay


def schedule_file(name: str) -> ScheduleFile | None:
    """The schedule file of a --pipeline-schedule as it was first read; None if it names a family. Raises UserError."""
    if not _names_file(name):
        return None
    return _process.files.get(name) or _read(name, text_of_file)


def family_of(name: str) -> Family:
    """The record of a value of --pipeline-schedule. Raises UserError for a name that is neither family nor file."""
    file = schedule_file(name)
    return file.family if file else family(name)


def run_settings(args: argparse.Namespace) -> RunSettings:
    """The run's settings from parsed arguments, or from those of `options.early_arguments`. Raises UserError as
    `family_of`.
    """
    with _named():
        name = args.pipeline_schedule
        return RunSettings(family_of(name), schedule_file(name), bool(args.vocab_parallel), args.offload_chunks)


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"--pipeline-schedule: {error}") from None


def _names_file(name: str) -> bool:
    return name not in FAMILIES and is_file(name)


def _read(name: str, text_of: Callable[[str], str]) -> ScheduleFile:
    text = text_of(name)
    _process.files[name] = ScheduleFile(family_of_text(name, text), hashlib.sha256(text.encode()).hexdigest())
    return _process.files[name]
