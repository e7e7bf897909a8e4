"""Test that the lock files name what we use of Megatron, and what is said where the installed Megatron differs."""

import argparse
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from megatron_vp.mcore import megatron_lock, patch_table, patches
from megatron_vp.mcore.options.arguments import with_ours
from megatron_vp.mcore.patches import Patch

SCRIPT = Path(__file__).parents[2] / "scripts" / "lock_megatron.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("lock_megatron", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_file_is_up_to_date(script):
    assert patches.lock_file().read_text() == script.content(), "run python scripts/lock_megatron.py"


def test_the_lock_files_of_all_series_have_the_same_names():
    files = [patches.lock_file().with_name(f"megatron_{series}.txt") for series in patches.SUPPORTED_SERIES]
    first, *others = ({line.split()[1] for line in file.read_text().splitlines()} for file in files)
    only_some = {each["target"] for group in patch_table.GROUPS for each in group.patch if "unneeded_in" in each}
    for names in others:
        assert (first ^ names) - only_some == set(), "run scripts/lock_megatron.py with every supported Megatron"


def test_the_installed_megatron_has_what_we_use():
    assert megatron_lock.changed_symbols() == [] and megatron_lock.missing_options() == []


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("library")
    module.function = lambda a, b=1: None
    module.Kind = type("Kind", (), {})
    module.nothing = None
    monkeypatch.setitem(sys.modules, "library", module)
    yield module
    patches.undo(patches.in_force())


@pytest.mark.parametrize(
    ("path", "expected", "fits"),
    [
        ("function", "(a, b=1)", True),
        ("function", "(a)", False),
        ("function", "(a) called (_)", True),
        ("function", "(a) called (_) (_, b)", True),
        ("function", "(a, c=2) called (_) (_, c)", False),
        ("function", "(a, b, c) called (_, _, _)", False),
        ("function", "() called ()", False),
        ("function", "() called (...)", True),
        ("function", "class", False),
        ("Kind", "class", True),
        ("Kind", "class called ()", True),
        ("nothing", "value", True),
        ("nothing", "any", True),
        ("gone", "any", False),
    ],
)
def test_a_symbol_must_accept_our_calls_or_be_as_recorded(library, monkeypatch, path, expected, fits):
    monkeypatch.setattr(megatron_lock, "locked", lambda kind: {f"library:{path}": expected})
    problems = megatron_lock.changed_symbols()
    assert (problems == []) == fits
    for problem in problems:
        assert problem.startswith(f"library:{path} does not fit megatron_vp: expected ")


def test_a_patched_symbol_is_judged_by_its_original(library, monkeypatch):
    patches.apply((Patch("library:function", lambda original: lambda: None, "any", "(a, b=1)"),))
    monkeypatch.setattr(megatron_lock, "locked", lambda kind: {"library:function": "(a, b=1) called (_)"})
    assert megatron_lock.changed_symbols() == []


def parser(without=()):
    """Megatron's parser with our options, as a release would have it that lacks some options."""
    from megatron.training import arguments

    def reduced(given):
        arguments.add_megatron_arguments(given)
        for action in [action for action in given._actions if action.dest in without]:
            given._remove_action(action)
            for name in action.option_strings:
                del given._option_string_actions[name]
        return given

    return with_ours(reduced)(argparse.ArgumentParser(allow_abbrev=False))


def test_an_option_that_the_installed_megatron_lacks_is_named(monkeypatch):
    from megatron.training import arguments

    lacking = parser(without={"async_save"})
    monkeypatch.setattr(arguments, "add_megatron_arguments", lambda given: lacking)
    (problem,) = megatron_lock.missing_options()
    assert problem.startswith("the argument 'async_save' does not fit megatron_vp: expected an option")
