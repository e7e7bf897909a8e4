"""Test `megatron-vp env`: it lists what is found and what is missing, and never fails."""

from __future__ import annotations

from importlib import metadata

from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.mcore.platform import environment


def test_parts_are_found_or_said_to_be_missing():
    parts = {name: (found, effect) for name, found, effect in environment.parts()}
    assert parts["megatron-core"] == (metadata.version("megatron-core"), "")
    assert all(effect for found, effect in parts.values() if found == "missing")


def test_a_broken_part_does_not_hide_the_others(monkeypatch):
    def broken():
        raise OSError("libcuda.so.1\nhas the wrong version")

    monkeypatch.setitem(environment._FIND, "GPU", broken)
    monkeypatch.setitem(environment._FIND, "SLURM", lambda: "here")
    found = {name: (version, bool(effect)) for name, version, effect in environment.parts()}
    assert found["GPU"] == ("broken: libcuda.so.1 has the wrong version", True) and found["SLURM"] == ("here", False)


def test_the_command_prints_a_line_for_each():
    done = CliRunner().invoke(app, ["env"])
    assert done.exit_code == 0
    assert "Transformer Engine" in done.stdout and "SLURM" in done.stdout
