"""Test Megatron's less common options: every number that a run logs equals plain Megatron's.

The jobs are those of the option survey in `matrix.toml`, each in plain Megatron and under several of our schedules.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from tests.harness.ranks import run_ranks
from tests.harness.training import set_weights, tiny_model
from tests.mcore.case_parts import SURVEY, Job, chunks, way_options

END_OF_DOCUMENT = 499
LENGTH = 32


def make_data(folder: Path) -> None:
    """Make the datasets a, b and c of different lengths, and the files that list them for options that read files."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(1)
    for name, sequences in (("a", 400), ("b", 16), ("c", 8)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32)
        left = sequences * LENGTH + 1
        while left > 0:
            length = min(int(random.integers(10, 90)), left)
            ids = [*random.integers(0, END_OF_DOCUMENT, length - 1), END_OF_DOCUMENT]
            builder.add_document(torch.tensor(ids, dtype=torch.int32), [length])
            left -= length
        builder.finalize(str(folder / f"{name}.idx"))
    (folder / "arguments").write_text(f"0.5 {folder}/a 0.5 {folder}/b\n")
    sets = {name: [str(folder / file)] for name, file in (("train", "a"), ("valid", "b"), ("test", "c"))}
    (folder / "sets.json").write_text(json.dumps(sets))


PLAIN = "plain"
SAVED_AT = 2
"""The iteration whose checkpoint of plain Megatron's the ways with several chunks per rank start from."""

_TIMES = re.compile(r"time|throughput|^mem-|energy|power")
_NUMBER = re.compile(r"^(.+?): +(-?[\d.]+(?:E[+-]\d+)?|nan|inf)(?: \(.*\))?$")
_ITERATION = re.compile(r"iteration +(\d+)")
_TITLE = re.compile(r"\] iteration +\d+/|loss at .*iteration")


BASE: Mapping[str, object] = {
    "hidden_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 500,
    "make_vocab_size_divisible_by": 128,
    "train_iters": 5,
    "adam_eps": 1e-5,
    "eval_iters": 1,
    "eval_interval": 2,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "log_validation_ppl_to_tensorboard": True,
    "tensorboard_log_interval": 1,
}
"""What every job has, unless it says otherwise, with two layers per rank."""


@dataclass
class Logged:
    """What a run logged.

    scalars: of its tensorboard file, by name, and by iteration (or samples) and number among those of this iteration:
        evaluations of the validation and the test set have one name.
    times: names of the scalars that are times, throughputs and memory, which are not compared.
    lines: what the iteration lines and the lines of evaluations say, by title: name to the number as it is printed.
    """

    scalars: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    times: set[str] = field(default_factory=set)
    lines: dict[str, dict[str, str]] = field(default_factory=dict)


def _sets_weights(job: Job) -> bool:
    """Whether all runs start from the same weights, set by their names."""
    return job.by_name or job.then is not None


def _starts_from_checkpoint(job: Job, way: str) -> bool:
    """Whether the run in this way continues plain Megatron's run from its checkpoint."""
    return chunks(way) > 1 and not _sets_weights(job)


def train(job: Job, way: str, data: Path, folder: Path, load: Path | None = None) -> list[Logged]:
    """Run a job in a way, `plain` or `schedule/algorithm`: what each of its one or two runs logged.

    `load` is where plain Megatron's run of the same job saved to, for ways that start from it.
    """
    runs: list[dict[str, object]] = [dict(job.options)]
    if job.then is not None:
        runs[0] = {"save_interval": 1000, **runs[0], "save": "{folder}/saved"}
        runs.append({**job.options, "load": "{folder}/saved", **job.then})
    elif way == PLAIN and any(_starts_from_checkpoint(job, each) for each in job.ways):
        runs[0] = {"save_interval": SAVED_AT, **runs[0], "save": "{folder}/saved"}
    elif way != PLAIN and _starts_from_checkpoint(job, way):
        runs[0] |= {"load": load, "ckpt_step": SAVED_AT}
    logged = []
    for number, options in enumerate(runs):
        board = folder / f"tensorboard{number}"
        arguments = _arguments(job, way, {**options, "tensorboard_dir": board})
        words = [word.replace("{data}", str(data)).replace("{folder}", str(folder)) for word in arguments]
        by_name = _sets_weights(job) and not number
        outputs = run_ranks(job.ranks, logged_case, words, by_name, timeout=300)
        logged.append(Logged(*_scalars(board), _lines(outputs[-1])))
    return logged


def _arguments(job: Job, way: str, options: Mapping[str, object]) -> list[str]:
    ours = dict(job.plain) if way == PLAIN else way_options(way, **options)
    if pattern := options.get("hybrid_layer_pattern"):
        layers, slash, heads = str(pattern).partition("/")
        stages = job.size * (1 if way == PLAIN else chunks(way))
        cuts = [len(layers) * stage // stages for stage in range(stages + 1)]
        segments = "|".join(layers[start:end] for start, end in pairwise(cuts))
        ours |= {"hybrid_layer_pattern": segments + slash + heads, "num_layers": None}
    sizes = {
        "pipeline_model_parallel_size": job.size,
        "global_batch_size": 8 * job.replicas,
        "num_layers": 2 * job.size,
    }
    return tiny_model(**{**BASE, **sizes, **options, **ours})


def logged_case(_rank: int, _world_size: int, arguments: list[str], by_name: bool) -> str:
    """Runs inside a rank: the whole of `pretrain_gpt_vp.main`; what it printed."""
    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    import pretrain_gpt_vp as script

    script.prepare()
    from megatron.training import get_tensorboard_writer, training

    build = training.setup_model_and_optimizer

    def setup(*args, **kwargs):
        model, optimizer, scheduler = build(*args, **kwargs)
        set_weights(model)
        if optimizer is not None:  # there is none with --skip-train
            optimizer.reload_model_params()
        return model, optimizer, scheduler

    output = io.StringIO()
    with ExitStack() as stack:
        if by_name:
            stack.enter_context(mock.patch.object(training, "setup_model_and_optimizer", setup))
        stack.enter_context(redirect_stdout(_Tee(output, sys.stdout)))
        try:
            script.main()
        except SystemExit as stop:  # several options end a run this way after saving
            assert stop.code in (None, 0), stop.code
        if writer := get_tensorboard_writer():
            writer.flush()
    return output.getvalue()


class _Tee(io.TextIOBase):
    """Writes to two streams: one to read, and the rank's own, which is shown where the rank fails."""

    def __init__(self, *streams: io.TextIOBase) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def _scalars(folder: Path) -> tuple[dict[str, dict[tuple[int, int], float]], set[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    times = {tag for tag in events.Tags()["scalars"] if _TIMES.search(tag)}
    scalars: dict[str, dict[tuple[int, int], float]] = {}
    for tag in set(events.Tags()["scalars"]) - times:
        for event in events.Scalars(tag):
            values = scalars.setdefault(tag, {})
            before = sum(step == event.step for step, _ in values)
            values[event.step, before] = event.value
    return scalars, times


def _lines(output: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in output.splitlines():
        title, *parts = (part.strip() for part in line.split("|"))
        if not _TITLE.search(title):
            continue
        if "loss at" not in title:
            title = f"iteration {_ITERATION.search(title)[1]}"
        numbers = (_NUMBER.match(part) for part in parts)
        found[title] = {match[1]: match[2] for match in numbers if match and not _TIMES.search(match[1])}
    return found


def differences(job: Job, found: Logged, plain: Logged, moved: bool) -> list[str]:
    """What differs by more than the job's bound, a line for each number; empty where nothing does.

    `moved` says that the run started from plain Megatron's checkpoint: it has logged the later iterations only.
    """
    distances = _distances(job, found, plain, moved)
    return [f"{what}: {distance:.1e}" for what, distance in distances if not distance <= job.bound]


ZEROS = 5
"""Gradients that are exactly zero, of ten thousand and more: rounding makes some or loses them."""


def _distances(job: Job, found: Logged, plain: Logged, moved: bool) -> Iterator[tuple[str, float]]:
    for tag in sorted(plain.scalars.keys() | found.scalars.keys()):
        expected, ours = plain.scalars.get(tag, {}), found.scalars.get(tag, {})
        if moved:
            after = SAVED_AT * (8 * job.replicas if tag.endswith("vs samples") else 1)
            expected = {step: value for step, value in expected.items() if step[0] > after}
        if not tag.startswith(job.but):
            for step in sorted(expected.keys() | ours.keys()):
                yield f"{tag} at {step[0]}", _distance(ours.get(step), expected.get(step), "zeros" in tag)
    # The second line of a run averages the losses of two iterations, and of a moved run that is a later line.
    left_out = {_second_line(found), _second_line(plain)} if moved else set()
    first = SAVED_AT if moved else -1
    for title in {**plain.lines, **found.lines}:
        if title in left_out or int(_ITERATION.search(title)[1]) <= first:
            continue
        expected, ours = plain.lines.get(title, {}), found.lines.get(title, {})
        for name in {**expected, **ours}:
            if not name.startswith(job.but):
                yield (
                    f"{name} in the line of {title}",
                    _printed_distance(ours.get(name), expected.get(name), "zeros" in name),
                )


def _second_line(run: Logged) -> str:
    return [*(title for title in run.lines if title.startswith("iteration")), "", ""][1]


def _distance(ours: float | None, expected: float | None, is_count: bool) -> float:
    if ours is None or expected is None:
        return math.inf
    if ours == expected or (math.isnan(ours) and math.isnan(expected)):
        return 0.0
    off = abs(ours - expected)
    return 0.0 if is_count and off <= ZEROS else off / max(abs(expected), 1e-30)


def _printed_distance(ours: str | None, expected: str | None, is_count: bool) -> float:
    """As `_distance`, of what is left where the last printed digit may be one off."""
    if ours == expected or ours is None or expected is None:
        return 0.0 if ours == expected else math.inf
    mantissa, _, exponent = expected.partition("E")
    rounding = 1.01 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    off = abs(float(ours) - float(expected))
    return 0.0 if off <= rounding else _distance(float(ours), float(expected), is_count)


def covered() -> set[str]:
    """Names, with underscores, of Megatron's options that the jobs give."""
    jobs = [job for group in SURVEY.values() for job in group]
    given = {name for job in jobs for options in (BASE, job.options, job.then or {}) for name in options}
    return given - {"core_attention"}  # an option of ours


BY_NAME = {job.name: job for jobs in SURVEY.values() for job in jobs}
RUNS = [
    pytest.param(job.name, way, marks=() if way == job.default else pytest.mark.slow, id=f"{group}-{job.name}-{way}")
    for group, jobs in SURVEY.items()
    for job in jobs
    for way in job.ways
]


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    """Small datasets, and plain Megatron's runs, made once each: `data`; `plain(name)` gives runs and their folder."""
    data = tmp_path_factory.mktemp("data")
    make_data(data)

    @cache
    def plain(name):
        folder = tmp_path_factory.mktemp("plain")
        return train(BY_NAME[name], PLAIN, data, folder), folder

    return SimpleNamespace(data=data, plain=plain)


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_every_logged_number_equals_plain_megatrons(survey, tmp_path, name, way):
    job = BY_NAME[name]
    expected, folder = survey.plain(name)
    moved = _starts_from_checkpoint(job, way)
    runs = train(job, way, survey.data, tmp_path, folder / "saved")
    for number, (found, plain) in enumerate(zip(runs, expected, strict=True)):
        assert found.lines
        assert not differences(job, found, plain, moved), f"run {number}"
        # Our passes send and receive beside each other, and no timer of Megatron's counts that.
        assert {name for name in plain.times - found.times if not re.search("send|recv", name)} == set()


def test_every_name_is_an_option_of_megatrons():
    (options,) = run_ranks(1, megatron_options)
    assert covered() <= options


def megatron_options(_rank, _world_size):
    """Names of the options of Megatron's parser, with underscores."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {name.lstrip("-").replace("-", "_") for action in parser._actions for name in action.option_strings}
