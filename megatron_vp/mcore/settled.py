"""Holds this process's job: its validated arguments and all our decisions for it, which other modules read from here.

A job's startup takes these steps, in this order:

1. `start/launch.py` calls `begin`, which reads the schedule file if one is named.
2. The parser in `options/arguments.py` stores the words of the command line with `note_words`.
3. `options/settle.py` validates the arguments and makes the `SettledJob`.
4. Once process groups exist, `start/same_job.py` gives all ranks the order costs of rank 0.

Functions of ours that Megatron calls get the job from `current()` and pass it on. This module does not import Megatron.
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
    """A schedule file as read at startup. The run never reads the file again."""

    family: Family
    digest: str
    """SHA-256 of its text, in hexadecimal digits."""


@dataclass(frozen=True)
class Words:
    """The words of a run's command line and configuration files, before parsing."""

    all: tuple[str, ...] = ()
    """All words that were parsed: first the flags added for the platform, then the words of configuration files, then
    the words of the command line.
    """
    platform_flags: tuple[str, ...] = ()
    """Megatron's flags that were added for the platform."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options in `all`, by argument name."""


@dataclass(frozen=True)
class Replay:
    """The settings of a replay of one rank that its arguments do not contain."""

    job: JobConfig | None = None
    """The whole job, before the replay's changes to it."""
    meter: Any = None
    """The memory counter of a replay of shapes, a `reports.memory.Meter`; None in other runs."""
    counts_engine: bool = False
    """Whether local layers keep the activations that Transformer Engine's layers would keep."""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that follow from --pipeline-schedule, --vocab-parallel and --offload-chunks."""

    family: Family
    """The family of the named schedule, or a family made from the schedule file."""
    file: ScheduleFile | None
    vocab_parallel: bool
    offload: str = "0"
    """The value of --offload-chunks."""

    @property
    def replaces_schedule(self) -> bool:
        """Whether the plug-in runs the pipeline. Otherwise Megatron runs it, even with virtual stages."""
        return self.vocab_parallel or self.family.name != DEFAULT_SCHEDULE or self.offload != "0"

    @property
    def offloads(self) -> bool:
        """Whether the activations of some chunks are kept in host memory between forward and backward."""
        return self.offload != "0" or bool(self.family.fixed and self.family.fixed.offloaded)

    def offload_chunks(self, chunks: int) -> int:
        """The number of offloaded chunks out of `chunks` per rank, unless a schedule file lists these chunks."""
        return chunks_to_offload(self.offload, chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are computed in separate passes."""
        return self.family.splits_backward

    @property
    def places_chunks(self) -> bool:
        """Whether chunks are placed differently from Megatron, in which chunk c of rank r is stage c p + r."""
        return not self.family.in_rounds

    @property
    def last_stage_elsewhere(self) -> bool:
        """Whether the last stage is on a rank other than p - 1."""
        return not self.family.ends_on_last_rank

    def placement(self, ranks: int, chunks: int) -> Placement:
        """The virtual stage of each chunk on each of `ranks` pipeline ranks."""
        if not self.replaces_schedule:
            return Placement.round_robin(ranks, chunks)
        return self.family.placement_of(ranks, chunks)


@dataclass(frozen=True)
class GivenLayout:
    """How the user's arguments divide the model into stages, before a schedule or balanced shards change that."""

    layout: str | None
    pattern: Pattern | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> GivenLayout:
        """Read the layout from parsed arguments, before anything is derived from them."""
        return cls(args.pipeline_model_parallel_layout, pattern_in(vars(args)))


@dataclass(frozen=True)
class ChosenRows:
    """The chosen vocabulary rows of a job, and possibly a layout."""

    rows: tuple[int, ...] | None = None
    """The number of rows by pipeline rank, for all tensor ranks of a stage together; None for equal shards."""
    reason: str | None = None
    """Why the plug-in chose these rows; None if the user gave them, or for equal shards that need no explanation."""
    layout: str | None = None
    """The layout that was chosen with the rows (for a hybrid model, a pattern with bars); None keeps the user's layout.
    """


@dataclass(frozen=True)
class SettledJob:
    """Everything that the plug-in has decided for a run."""

    args: argparse.Namespace
    """Megatron's validated arguments. This is Megatron's own object, and training changes some of them."""
    settings: RunSettings
    given: GivenLayout
    shards: ChosenRows
    order: Costs | None
    """The costs by which passes are ordered; None means `PassCosts()`. All ranks of a run use rank 0's costs."""
    parts: Mapping[str, str]
    """The implementation of layers, norms and so on; see `platform.parts`."""
    words: Words
    nodes: Installed | None
    """The packages of the nodes if the job was checked for nodes other than this machine; None otherwise."""
    checkpoint_to_load: str | None = None
    """The directory of the checkpoint; None if the run starts from scratch, or if the checkpoint is not checked."""

    @property
    def method(self) -> VocabMethod:
        """The method of the vocabulary layers, unless the schedule has its own."""
        return VocabMethod(self.args.vocab_parallel_algorithm if self.settings.vocab_parallel else VocabMethod.NONE)

    @property
    def placement(self) -> Placement:
        """The virtual stage of each chunk on each pipeline rank."""
        chunks = self.args.virtual_pipeline_model_parallel_size or 1
        return self.settings.placement(self.args.pipeline_model_parallel_size, chunks)


class OwnLoop(Protocol):
    """The interface through which `megatron_vp.enable` sets up the job of a script with its own training loop."""

    words: tuple[str, ...]
    """The settings of the call, as words of a command line."""

    def reads_arguments(self) -> bool:
        """Whether the job came from Megatron's own arguments. If so, Megatron's builders prepare the model."""

    def settle_for(self, model: Mapping[str, Any]) -> SettledJob:
        """Make the job from the arguments of a model's constructor, given by name; later models use the same job."""


class _Process:
    """The state of this process."""

    def __init__(self) -> None:
        self.replay = Replay()
        self.own_loop: OwnLoop | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the job, its schedule file and its words, but keep the replay and the own loop."""
        self.files: dict[str, ScheduleFile] = {}
        self.words = Words()
        self.job: SettledJob | None = None


_process = _Process()


def begin(schedule: str, text_of: Callable[[str], str] = text_of_file) -> None:
    """Begin a job's startup: forget any earlier job, and read the schedule file if --pipeline-schedule names one.

    `text_of` returns a file's text. Raises UserError for a file that cannot be used.
    """
    clear()
    if _names_file(schedule):
        with _named():
            _read(schedule, text_of)


def note_words(words: Words) -> None:
    """Store the words that were parsed."""
    _process.words = words


def words() -> Words:
    """The words of this process's arguments, before parsing."""
    return _process.words


def settle(job: SettledJob) -> None:
    """Make `job` the job of this process, which `current` returns from now on."""
    _process.job = job


def current() -> SettledJob:
    """The job of this process. Call this only after Megatron's arguments have been validated."""
    assert _process.job is not None, "a function of ours was called before Megatron's arguments were validated"
    return _process.job


@contextmanager
def placed_as_megatron() -> Iterator[None]:
    """Place chunks, inside this context, as plain Megatron does, so that models are built from the same chunks."""
    job = current()
    settle(replace(job, settings=replace(job.settings, family=megatrons_own())))
    try:
        yield
    finally:
        settle(job)


def is_settled() -> bool:
    """Whether this process has a job, so that `current` can return it."""
    return _process.job is not None


def own_loop() -> OwnLoop | None:
    """The interface to the current call of `megatron_vp.enable`; None if there was none, or if it was undone."""
    return _process.own_loop


def note_own_loop(own_loop: OwnLoop | None) -> None:
    """Store the interface to a call of `megatron_vp.enable`, or None if the call was undone."""
    _process.own_loop = own_loop


def clear() -> None:
    """Forget the job of this process."""
    _process.clear()


@contextmanager
def replaying(**changes: Any) -> Iterator[None]:
    """Mark this process, inside this context, as a replay of one rank; `changes` are fields of `Replay`."""
    before = _process.replay
    _process.replay = replace(before, **changes)
    try:
        yield
    finally:
        _process.replay = before


def replay() -> Replay:
    """The settings of the replay in this process; the defaults if it is not a replay."""
    return _process.replay


def schedule_file(name: str) -> ScheduleFile | None:
    """The schedule file that --pipeline-schedule names, as first read; None if it names a family. Raises UserError."""
    if not _names_file(name):
        return None
    return _process.files.get(name) or _read(name, text_of_file)


def family_of(name: str) -> Family:
    """The family for a value of --pipeline-schedule. Raises UserError if the value is neither a family nor a file."""
    file = schedule_file(name)
    return file.family if file else family(name)


def run_settings(args: argparse.Namespace) -> RunSettings:
    """Return the settings of a run from its arguments, parsed or from `options.early_arguments`. Raises UserError like
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
