"""Stores the description of this process's job, and all decisions that megatron_vp has made for the job.

A job's startup takes these steps, in this order:

1. `start/launch.py` calls `begin`, which reads the schedule file if one is named.
2. The parser in `options/arguments.py` stores the words of the command line in `process`.
3. `options/settle.py` lets Megatron validate its arguments, and makes the `SettledJob`.
4. Once process groups exist, `start/same_job.py` sends rank 0's pass costs to all ranks, so that all derive the same
   order of passes from them.

Functions that Megatron calls get the job from `current()` and pass it to the functions that they call. This module does
not import Megatron at its start.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import split_config
from megatron_vp.jobs.job_config import JobConfig, read_job_config
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.platform.installed import Installed
from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES, Costs, Family, Placement, VocabMethod, family
from megatron_vp.schedule.families import family_of_text, is_file, megatrons_own, text_of_file
from megatron_vp.schedule.request import chunks_to_offload

ROLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("roles.toml").read_text())
"""Megatron's arguments by what we do with them."""


@dataclass(frozen=True)
class Words:
    """The words of a run's command line and configuration files, before parsing."""

    all: tuple[str, ...] = ()
    """All words, in the order of parsing: the platform's flags, then configuration files, then the command line."""
    platform_flags: tuple[str, ...] = ()
    """The flags of Megatron that the plug-in added because of the machine; see `platform.flags`."""

    @property
    def options(self) -> list[str]:
        """The options in `all`, in their order."""
        return [word.partition("=")[0] for word in self.all if word.startswith("--")]


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that follow from --pipeline-schedule, --vocab-parallel and --offload-chunks."""

    family: Family
    """The family of the named schedule, or a family made from the schedule file."""
    digest: str | None
    """The SHA-256 of the schedule file's text, in hexadecimal digits; None without a file."""
    vocab_parallel: bool
    offload: str = "0"
    """The value of --offload-chunks."""

    @property
    def replaces_schedule(self) -> bool:
        """Whether the plug-in runs the pipeline schedule; otherwise, Megatron runs 1F1B or interleaved 1F1B."""
        return self.vocab_parallel or self.family.name != DEFAULT_SCHEDULE or self.offload != "0"

    @property
    def offloads(self) -> bool:
        """Whether the activations of some chunks are moved to host memory between forward and backward."""
        return self.offload != "0" or bool(self.family.fixed and self.family.fixed.offloaded)

    def offload_chunks(self, chunks: int) -> int:
        """The number of chunks that --offload-chunks offloads on a rank with `chunks` chunks. A schedule file lists the
        offloaded chunks itself.
        """
        return chunks_to_offload(self.offload, chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are computed in separate passes."""
        return self.family.splits_backward

    @property
    def places_chunks(self) -> bool:
        """Whether chunks are placed differently than in Megatron, where chunk c of rank r is stage c * p + r."""
        return not self.family.in_rounds

    def placement(self, ranks: int, chunks: int) -> Placement:
        """The virtual stage of each chunk on each of `ranks` pipeline ranks."""
        if not self.replaces_schedule:
            return Placement.round_robin(ranks, chunks)
        return self.family.placement_of(ranks, chunks)


@dataclass(frozen=True)
class ChosenRows:
    """The number of vocabulary rows chosen for each rank of a job, and the layout if one was chosen with the rows."""

    rows: tuple[int, ...] | None = None
    """The number of rows of each pipeline rank, summed over its tensor ranks; None for equal shards."""
    reason: str | None = None
    """Why the plug-in chose these rows; None if the user gave them, or for equal shards that need no explanation."""
    layout: str | None = None
    """The layout chosen with the rows (for a hybrid model, a pattern with `|`); None to keep the user's layout."""
    whole: bool = False
    """Whether the vocabulary layers stay whole: the job is the one without --vocab-parallel."""


@dataclass(frozen=True)
class SettledJob:
    """Everything that the plug-in has decided for a run."""

    arguments: Arguments
    """The job with our choices, as Megatron has validated it."""
    settings: RunSettings
    given: Arguments
    """The job before the plug-in chose anything."""
    shards: ChosenRows
    order: Costs | None
    """The pass costs that determine the order of passes; None means `PassCosts()`. All ranks use rank 0's costs."""
    parts: Mapping[str, str]
    """The implementation used for layers, norms and other operations; see `parts_of_job`."""
    words: Words
    nodes: Installed | None
    """The packages installed on the nodes if the job was checked for nodes other than this machine; otherwise None."""
    checkpoint_to_load: str | None = None
    """The directory of the checkpoint to load. None if the run starts from scratch, or if the checkpoint was not
    checked (see `check_checkpoint`).
    """
    warnings: tuple[str, ...] = ()
    """Sentences about options without their intended effect; see `refusals.warnings_of`."""
    args: Any = None
    """Megatron's own arguments, in which training changes some values; None if Megatron does not parse arguments."""

    def of(self, args: Any) -> SettledJob:
        """This job with Megatron's arguments as they are now."""
        return replace(self, args=args, arguments=Arguments(vars(args)))

    @property
    def method(self) -> VocabMethod:
        """The vocabulary method that the options specify. The schedule family may replace it (see `Family.method`)."""
        return VocabMethod(
            self.arguments.vocab_parallel_algorithm if self.settings.vocab_parallel else VocabMethod.NONE
        )

    @property
    def placement(self) -> Placement:
        """The virtual stage of each chunk on each pipeline rank."""
        chunks = self.arguments.virtual_pipeline_model_parallel_size or 1
        return self.settings.placement(self.arguments.pipeline_model_parallel_size, chunks)


@dataclass
class OwnLoop:
    """A script with its own training loop, which has called `megatron_vp.enable`."""

    words: tuple[str, ...]
    """The settings that were passed to `megatron_vp.enable`, as words of a command line."""
    described: Callable[[Mapping[str, Any]], Arguments]
    """Describes the job of a model, given the model's constructor arguments by name."""
    settled: Callable[[Arguments], SettledJob]
    """Settles a described job. All ranks call it."""
    jobs: list[tuple[Arguments, SettledJob]] = field(default_factory=list)
    """The descriptions of all models so far, and their jobs."""

    def reads_arguments(self) -> bool:
        """Whether the job was made from arguments that Megatron parsed. If not, `settle_for` makes the job."""
        return process.job is not None and process.job.args is not None

    def settle_for(self, model: Mapping[str, Any]) -> SettledJob:
        """The job of a model, given its constructor arguments by name. Models of equal descriptions share a job."""
        given = self.described(model)
        job = next((job for each, job in self.jobs if vars(each) == vars(given)), None)
        if job is None:
            job = self.settled(given)
            self.jobs.append((given, job))
        process.job = job
        return job


@cache
def _read(name: str) -> tuple[Family, str]:
    """The family made from a schedule file, and the digest of its text. A job reads its file only once, at startup."""
    text = text_of_file(name)
    return family_of_text(name, text), hashlib.sha256(text.encode()).hexdigest()


@dataclass
class _Process:
    """What this process knows of its job."""

    words: Words = Words()
    """The words from which its arguments are parsed."""
    job: SettledJob | None = None
    replayed: JobConfig | None = None
    """In a replay of one rank, the configuration of the job, before the replay changes it."""
    meter: Any = None
    """The memory counter (`replay.shapes_only`) of a replay with --shapes-only; None in other runs."""
    counts_engine: bool = False
    """Whether local layers keep the activations that Transformer Engine's layers would keep."""
    pipelines: dict[Any, Any] = field(default_factory=dict)
    """The pipelines of all models, by their connections; see `surgery.create_pipeline`."""
    plain: bool = False
    """Whether models are built and run as in plain Megatron; see `Handle.plain_models`."""
    own_loop: OwnLoop | None = None
    """That of the last call of `megatron_vp.enable`; None if there was no call or it was undone."""


process = _Process()


def early_arguments(words: list[str]) -> Arguments:
    """Read the arguments of a command line that decide which patches a job needs: Megatron's parser is itself patched.

    They are switches or texts. Megatron's parser reports malformed arguments. Raises UserError for a configuration file
    that cannot be read.
    """
    files, flags = split_config(words)
    first = next((place for place, word in enumerate(flags) if word.startswith("--")), len(flags))
    given = read_job_config(files, flags[first:]).items()
    texts = {name: each if each is None or isinstance(each, bool) else str(each) for name, each in given}
    ranks = {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    return Arguments.given(texts | ranks)


def begin(schedule: str | None = None) -> None:
    """Forget any earlier job, and read the schedule file if --pipeline-schedule names one. Raises UserError if the file
    cannot be used.
    """
    _read.cache_clear()
    process.words, process.job, process.pipelines = Words(), None, {}
    if schedule is not None and _names_file(schedule):
        family_of(schedule)


MODEL = "vocabulary_parallel_model"
"""Attribute in which a chunk keeps its `RankModel`; None if it was built inside `Handle.plain_models`."""


def is_plain(model: Any) -> bool:
    """Whether a model, one chunk or a list, was built inside `Handle.plain_models`, or the code runs inside it."""
    from megatron.core.utils import unwrap_model

    chunk = unwrap_model(model[0] if isinstance(model, list) else model)
    return process.plain or getattr(chunk, MODEL, chunk) is None


def current() -> SettledJob:
    """Return the job of this process. Call this only after Megatron's arguments have been validated."""
    assert process.job is not None, "a megatron_vp function was called before Megatron's arguments were validated"
    return process.job


@contextmanager
def placed_as_megatron(layout: Mapping[str, Any]) -> Iterator[None]:
    """Inside this context, let each rank build the chunks of `layout` that it would have in plain Megatron."""
    job = current()
    process.job = replace(job, arguments=job.arguments | layout, settings=replace(job.settings, family=megatrons_own()))
    try:
        yield
    finally:
        process.job = job


def family_of(name: str) -> Family:
    """Return the schedule family for a value of --pipeline-schedule. Raises UserError for an unknown value."""
    try:
        return _read(name)[0] if _names_file(name) else family(name)
    except UserError as error:
        raise UserError(f"--pipeline-schedule: {error}") from None


def run_settings(args: Arguments) -> RunSettings:
    """Return the settings that follow from a run's arguments.

    Until `settled_job` chooses the default schedule, it counts as 1f1b, which needs the same patches as interleaved.
    Raises UserError if --pipeline-schedule names neither a schedule family nor a file.
    """
    name = args.pipeline_schedule or DEFAULT_SCHEDULE
    named = family_of(name)
    digest = _read(name)[1] if _names_file(name) else None
    return RunSettings(named, digest, bool(args.vocab_parallel), args.offload_chunks or "0")


def _names_file(name: str) -> bool:
    return name not in FAMILIES and is_file(name)
