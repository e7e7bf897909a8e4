"""Test the patch registry on a small module of its own, and the declared patches on the installed Megatron."""

import contextlib
import io
import sys
import types

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.mcore import patch_table, patches
from megatron_vp.mcore.patches import Patch
from tests.harness import run_ranks


@pytest.fixture
def library(monkeypatch):
    """A module `library` with one symbol of every kind that can be patched."""
    module = types.ModuleType("library")

    def plain(a, b=1):
        return a + b

    class Base:
        def inherited(self):
            return "base"

    class Thing(Base):
        builder = "their.Builder"

        def method(self, x):
            return x

        @staticmethod
        def static(x):
            return x

        @classmethod
        def constructor(cls, x):
            return cls, x

    module.plain, module.Base, module.Thing = plain, Base, Thing
    monkeypatch.setitem(sys.modules, "library", module)
    yield module
    patches.undo(patches.in_force())


def double(original):
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


PLAIN = Patch("library:plain", double, "doubles", "(a, b=1)")
METHOD = Patch("library:Thing.method", double, "doubles", "(self, x)")


def test_every_kind_of_symbol_is_replaced_and_restored_exactly(library):
    declared = (
        PLAIN,
        METHOD,
        Patch("library:Thing.static", double, "doubles", "(x)"),
        Patch("library:Thing.constructor", lambda f: lambda cls, x: (f(cls, x), "new"), "marks", "(x)"),
        Patch("library:Thing.inherited", double, "doubles", "(self)"),
        Patch("library:Thing.builder", lambda _: "our.Builder", "ours", "value"),
    )
    before = [dict(vars(owner)) for owner in (library, library.Base, library.Thing)]
    new = patches.apply(declared)
    thing = library.Thing()
    assert library.plain(1) == 4
    assert thing.method(3) == 6
    assert library.Thing.static(3) == thing.static(3) == 6
    assert library.Thing.constructor(1) == ((library.Thing, 1), "new")
    assert thing.inherited() == "basebase" and library.Base().inherited() == "base"
    assert library.Thing.builder == "our.Builder"
    patches.undo(new)
    assert [dict(vars(owner)) for owner in (library, library.Base, library.Thing)] == before


def test_applying_twice_wraps_once_and_undoes_once(library):
    assert patches.apply((PLAIN,)) == (PLAIN,)
    assert patches.apply((PLAIN, METHOD)) == (METHOD,)
    assert patches.apply((PLAIN,)) == () and library.plain(1) == 4
    patches.undo((PLAIN, METHOD))
    patches.undo((PLAIN, METHOD))
    assert library.plain(1) == 2 and patches.in_force() == ()


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (Patch("library:Thing.method", double, "doubles", "(self, y)"), "(self, x)"),
        (Patch("library:Thing.gone", double, "doubles", "(self)"), "found nothing"),
        (Patch("no_such_library:f", double, "doubles", "()"), "No module named 'no_such_library'"),
        (Patch("library:Thing.builder", double, "doubles", "()"), "value"),
    ],
)
def test_nothing_is_patched_unless_everything_fits(library, bad, found):
    with pytest.raises(UserError) as error:
        patches.apply((PLAIN, bad))
    message = str(error.value)
    assert bad.target in message and found in message and "0.19.2" in message and "\n" not in message
    assert library.plain(1) == 2 and patches.in_force() == ()


def test_a_patch_that_was_overwritten_is_reported(library):
    patches.apply((PLAIN,))
    library.plain = lambda a, b=1: 0
    assert "assigned later" in patches.fault(PLAIN)


def test_a_release_that_is_not_supported_is_answered_by_the_command_that_brings_one(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.18.0")
    with pytest.raises(
        UserError, match=r"0\.18\.0 in /.*/megatron/core is not supported: .*`pip install --no-deps mega"
    ):
        patches.installed_version()


def test_every_declared_patch_fits_the_installed_megatron_and_names_its_reason():
    declared = [patch for group in patch_table.GROUPS for patch in patch_table.patches_of(group.name)]
    assert not any(
        patches.fault(patch) for group in patch_table.GROUPS if group.is_present() for patch in group.declared()
    )
    # A run selects one of these two: it has Megatron's own schedule, or ours.
    exclusive = {patch.target for patch in patch_table.patches_of("plain schedule")}
    ours = {patch.target for patch in patch_table.patches_of("pipeline schedule")}
    assert {target.partition(":")[2][:17] for target in exclusive & ours} == {"forward_backward_"}
    assert len({patch.target for patch in declared}) == len(declared) - len(exclusive & ours)
    assert all(patch.reason and "\n" not in patch.reason for patch in declared)
    assert len({group.name for group in patch_table.GROUPS}) == len(patch_table.GROUPS)
    assert all(group.sentence and group.without for group in patch_table.GROUPS)


def invoke(*arguments):
    return CliRunner().invoke(app, ["patches", *arguments])


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_the_command_lists_everything_and_leaves_nothing_patched(arguments, monkeypatch):
    real, applied = patches.apply, []
    monkeypatch.setattr(patches, "apply", lambda declared: applied.append(declared) or real(declared))
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    groups = patch_table.GROUPS
    declared = {group.name: group.declared() if group.is_present() else () for group in groups}
    assert {group.package for group in groups if not declared[group.name]} <= {"megatron.bridge"}
    assert applied == ([] if arguments else list(declared.values()))
    for group in groups:
        line = f"{group.name}: {group.sentence}; applied {group.stage}; without it, {group.without}\n"
        assert line in result.output
        for patch in declared[group.name]:
            assert patch.target in result.output and patch.reason in result.output
    for kind, subject in (("used", "symbols that the plug-in uses"), ("option", "options that the plug-in reads")):
        count = len(patches.locked(kind))
        assert f"Megatron {subject}: {count} of {count} fit" in result.output
    assert f"all patches fit megatron-core {patches.installed_version()}" in result.output and patches.in_force() == ()


def fake_module(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.18.2")


def change_signature(monkeypatch):
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "validate_args", lambda args: None)


def remove_symbol(monkeypatch):
    from megatron.training import training

    monkeypatch.delattr(training, "get_model")


def change_what_is_called(monkeypatch):
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(schedules, "backward_step", lambda output_tensor: None)


TAMPERED = [
    (fake_module, "0.18.2"),
    (change_signature, "megatron.training.arguments:validate_args"),
    (remove_symbol, "megatron.training.training:get_model"),
]


CALLED = (change_what_is_called, "megatron.core.pipeline_parallel.schedules:backward_step does not fit")


@pytest.mark.parametrize(("tamper", "named"), [*TAMPERED, CALLED])
def test_the_command_fails_and_names_what_does_not_fit(monkeypatch, tamper, named):
    tamper(monkeypatch)
    result = invoke("--dry-run")
    assert result.exit_code == 1 and named in result.output and "0.19.2" in result.output


def start_with(_rank, _world_size, tamper):
    """What a training start on a tampered Megatron writes and returns, and whether it came to a process group."""
    import torch

    import pretrain_gpt_vp

    sys.argv = ["pretrain_gpt_vp.py", "--vocab-parallel"]
    tamper(pytest.MonkeyPatch())
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        pretrain_gpt_vp.prepare()
    return stop.value.code, errors.getvalue(), torch.distributed.is_initialized(), patches.in_force()


@pytest.mark.parametrize(("tamper", "named"), TAMPERED[1:2])
def test_a_training_start_fails_the_same_way_on_every_rank(tamper, named):
    for rank, (code, text, initialized, in_force) in enumerate(run_ranks(2, start_with, tamper)):
        assert code == 2
        if rank == 0:
            assert text.startswith("error: ") and text.count("\n") == 1 and named in text and "0.19.2" in text
        else:
            assert text == ""
        assert not initialized and in_force == ()
