"""Test that tables name everything that we use of Megatron, and that the installed Megatron has all of it."""

import sys
import types
from collections import defaultdict

import pytest

from megatron_vp.mcore import megatron_symbols, patches
from megatron_vp.mcore.patches import Patch
from tests.mcore.megatron_uses import sources, symbols_of


def test_every_symbol_that_a_source_imports_is_in_the_table_and_no_other():
    found = defaultdict(set)
    for room, path in sources():
        found[room] |= symbols_of(path.read_text())
    listed = {room: set(symbols) for room, symbols in megatron_symbols.IMPORTED.items()}
    for room in {*found, *listed}:
        missing, stale = found[room] - listed.get(room, set()), listed.get(room, set()) - found[room]
        assert not missing, f"add to IMPORTED[{room!r}] in mcore/megatron_symbols.py: {sorted(missing)}"
        assert not stale, f"{room} does not import: {sorted(stale)}"


@pytest.mark.parametrize("room", megatron_symbols.rooms())
def test_the_installed_megatron_has_what_a_room_uses(room):
    assert megatron_symbols.check_symbols(room) == []


def test_a_release_series_may_have_another_signature_or_lack_a_symbol(library, monkeypatch):
    uses = {"room": {"library:function": "(a, b=1)", "library:gone": "present", "library:Kind": "class"}}
    different = {"9.1": {"library:function": "(a, b=2)", "library:gone": megatron_symbols.UNUSED}}
    monkeypatch.setattr(megatron_symbols, "IMPORTED", uses)
    monkeypatch.setattr(megatron_symbols, "IN_SERIES", different)
    (problem,) = megatron_symbols.check_symbols("room")
    assert problem.target == "library:gone" and megatron_symbols.count("room") == 3
    monkeypatch.setattr(megatron_symbols, "present_series", lambda: "9.1")
    (problem,) = megatron_symbols.check_symbols("room")
    assert problem.target == "library:function" and megatron_symbols.count("room") == 2
    library.function = lambda a, b=2: None
    assert megatron_symbols.check_symbols("room") == []


def test_only_symbols_that_are_used_differ_between_series():
    used = {
        target
        for table in (megatron_symbols.IMPORTED, megatron_symbols.REACHED)
        for each in table.values()
        for target in each
    }
    assert {target for each in megatron_symbols.IN_SERIES.values() for target in each} <= used


def test_the_scan_sees_through_modules_classes_and_other_names():
    source = """
import torch
from megatron.core import mpu, parallel_state as state
from megatron.core.transformer.enums import AttnMaskType as Mask
from megatron.training import get_args

def later():
    from megatron.core.pipeline_parallel import schedules

    return schedules.backward_step, mpu.is_pipeline_first_stage(), state.get_tensor_model_parallel_rank(), Mask.causal
"""
    assert symbols_of(source) == {
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "megatron.core.parallel_state:is_pipeline_first_stage",
        "megatron.core.parallel_state:get_tensor_model_parallel_rank",
        "megatron.core.transformer.enums:AttnMaskType",
        "megatron.core.transformer.enums:AttnMaskType.causal",
        "megatron.training:get_args",
    }
    with pytest.raises(AssertionError, match="use `from megatron`"):
        symbols_of("import megatron.core.utils")


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
        ("function", "takes a", True),
        ("function", "takes a, b", True),
        ("function", "takes b", False),
        ("function", "takes a, c", False),
        ("function", "takes nothing", False),
        ("function", "class", False),
        ("function", "value", False),
        ("Kind", "class", True),
        ("Kind", "takes nothing", True),
        ("nothing", "value", True),
        ("nothing", "present", True),
        ("gone", "present", False),
    ],
)
def test_what_is_expected_of_a_symbol(library, path, expected, fits):
    problem = patches.check_symbol(f"library:{path}", expected)
    assert (problem is None) == fits, problem
    if problem is not None:
        assert str(problem).startswith(f"library:{path} does not fit megatron_vp: expected {expected}, found ")


def test_a_patched_symbol_is_judged_by_its_original(library):
    patches.apply((Patch("library:function", lambda original: lambda *args: None, "any", "(a, b=1)"),))
    assert patches.check_symbol("library:function", "(a, b=1)") is None
