"""Test the table of patch groups: which a run selects, when they are checked, and variants for release series."""

import argparse
import contextlib
import io
import sys
import types

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore import patch_table, patches
from megatron_vp.mcore.patch_table import PatchGroup
from megatron_vp.mcore.platform.installed import Installed
from megatron_vp.mcore.settled import early_arguments
from tests.harness import run_ranks

ENGINE = Installed(engine="2.17.1", apex=True)
WITHOUT_PACKAGES = {"no transformer engine", "warm-up", "no fused accumulation"}
SHARDS = {"vocabulary parallelism", "pipeline schedule"}
ALL_RUNS = {group.name for group in patch_table.GROUPS if group.sentence == "always"} | {"training log"}


@pytest.fixture(autouse=True)
def on_gpu_nodes(monkeypatch):
    monkeypatch.setattr(patch_table, "installed", lambda: ENGINE)
    monkeypatch.setattr(patch_table, "uses_cpu", lambda argv: False)


@pytest.fixture
def one_of_two_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("words", "on_cpu", "chosen"),
    [
        ("", False, set()),
        ("", True, {"cpu platform", *WITHOUT_PACKAGES}),
        ("--fake-process-group", False, {"replay"}),
        ("--vocab-parallel", False, SHARDS),
        ("--pipeline-schedule interleaved", False, {"pipeline schedule"}),
        ("--pipeline-schedule zb-h1 --transformer-impl local", False, {"pipeline schedule", "split backward"}),
        (
            "--pipeline-schedule=v-half --core-attention=sdpa",
            False,
            {
                *("pipeline schedule", "split backward", "delayed weight gradients", "chunk placement"),
                "flash attention",
            },
        ),
        (
            "--pipeline-schedule zb-h1",
            True,  # a run on CPU does without Transformer Engine
            {"pipeline schedule", "split backward", "cpu platform", *WITHOUT_PACKAGES},
        ),
        ("--rank-report there", False, {"plain schedule"}),
        ("--rank-report there --vocab-parallel", False, SHARDS),
        ("--iterations-to-skip 3 4", False, {"chunk data"}),
    ],
)
def test_what_a_command_line_selects(one_of_two_ranks, monkeypatch, words, on_cpu, chosen):
    if on_cpu:
        monkeypatch.setattr(patch_table, "installed", Installed)
        monkeypatch.setattr(patch_table, "uses_cpu", lambda argv: True)
    selected = patch_table.selected(early_arguments(words.split()))
    assert {group.name for group in selected} - ALL_RUNS == chosen


def test_a_configuration_selects_as_its_flags_do_and_the_command_line_wins(one_of_two_ranks, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text("a:\n  vocab_parallel: true\n  pipeline_schedule: zb-v\nb:\n  iterations_to_skip: [3]\n")
    args = early_arguments(["--config", str(config), "--pipeline-schedule", "zb-h1", "--num-layers", "4"])
    assert (args.vocab_parallel, args.pipeline_schedule, args.iterations_to_skip) == (True, "zb-h1", "[3]")


OLD = ({"target": "library:first", "make": "patched_first", "reason": "is old", "also": "(a)"},)
BY_SERIES = (
    {"target": "library:first", "make": "patched_first", "reason": "is patched everywhere"},
    {"target": "library:second", "make": "patched_second", "reason": "is gone", "also": "(b)", "unneeded_in": ["9.2"]},
)


@pytest.fixture
def library(monkeypatch):
    """A module with two functions, and patches of them that differ between release series."""
    module = types.ModuleType("library")
    module.first = lambda a: a
    module.second = lambda b: b
    module.patched_first, module.patched_second = (lambda original: lambda *a: "old",) * 2
    recorded = {"9.1": "(a, more)", "9.2": "(a, more)"}
    monkeypatch.setattr(
        patches, "locked", lambda kind: {"library:first": recorded.get(patches.present_series(), "(a)")}
    )
    monkeypatch.setitem(sys.modules, "library", module)
    yield module
    patches.undo(patches.in_force())


def of_series(monkeypatch, series, *groups):
    import megatron.core

    monkeypatch.setattr(patches, "SUPPORTED_SERIES", (*patches.SUPPORTED_SERIES, series))
    monkeypatch.setattr(megatron.core, "__version__", f"{series}.0")
    monkeypatch.setattr(patch_table, "GROUPS", groups)


@pytest.mark.parametrize(
    ("series", "first", "found"),
    [
        ("0.19", lambda a: a, ("old", "old")),
        ("9.1", lambda a, more: a, ("old", "old")),
        ("9.2", lambda a, more: a, ("old", "b")),
        ("9.3", lambda a: a, ("old", "old")),
    ],
)
def test_a_release_series_has_its_own_signature_of_a_symbol(library, monkeypatch, series, first, found):
    of_series(monkeypatch, series, PatchGroup("variants", "harm", "library", BY_SERIES))
    library.first = first
    given = ["a", "more"][: first.__code__.co_argcount]
    run = argparse.Namespace()
    patch_table.require_fit(run)
    patch_table.apply(run, early=True)
    assert patches.in_force() == ()
    for _ in range(2):  # the second time they are in force already
        patch_table.apply(run, early=False)
        assert (library.first(*given), library.second("b")) == found
        assert not any(map(patches.fault, patch_table.GROUPS[0].declared()))


def test_a_signature_is_compared_in_its_own_series_alone(library, monkeypatch):
    of_series(monkeypatch, "9.2", PatchGroup("variants", "harm", "library", BY_SERIES))
    run = argparse.Namespace()
    for start in (patch_table.require_fit, lambda run: patch_table.apply(run, early=False)):
        with pytest.raises(UserError, match=r"first does not fit megatron_vp: expected \(a, more\), found \(a\)"):
            start(run)
    assert patches.in_force() == ()


UNFIT = {
    "checkpoint files": [],
    "flash attention": ["--core-attention", "sdpa"],
    "vocabulary parallelism": ["--vocab-parallel"],
    "pipeline schedule": ["--pipeline-schedule", "interleaved"],
    "split backward": ["--pipeline-schedule", "zb-h1"],
    "chunk placement": ["--pipeline-schedule", "zb-v"],
}
"""Early and late groups, and the flags that select them on a CPU."""


def start_without_fit(_rank, _world_size):
    """What a start says, and what it leaves patched, where one patch of a group does not fit; with and without it."""
    from unittest import mock

    from megatron_vp.mcore.start import launch

    said = {}
    for name, flags in UNFIT.items():
        patch = patch_table.patches_of(name)[0]
        owner, attribute = patches._locate(patch.target)
        with mock.patch.object(owner, attribute, lambda changed: None):
            for words in (flags, []):
                argv, errors = ["script.py", *words], io.StringIO()
                with mock.patch.object(sys, "argv", argv), contextlib.redirect_stderr(errors):
                    try:
                        launch.prepare()
                        stopped = None
                    except SystemExit as stop:
                        stopped = stop.code
                said[name, tuple(words)] = (stopped, errors.getvalue(), patch.target, len(patches.in_force()))
                patches.undo(patches.in_force())
    return said


def test_a_group_that_does_not_fit_stops_the_start_before_the_first_patch():
    (said,) = run_ranks(1, start_without_fit)
    for name, flags in UNFIT.items():
        stopped, text, target, in_force = said[name, tuple(flags)]
        assert (stopped, in_force) == (2, 0), name
        assert text.startswith("error: ") and text.count("\n") == 1
        assert target in text and "found (changed)" in text and "0.19.2" in text
        if flags:  # nobody asked for it
            stopped, text, _, in_force = said[name, ()]
            assert stopped is None and in_force > 0 and text == "", (name, text)
