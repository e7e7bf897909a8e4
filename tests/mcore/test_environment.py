"""`megatron-vp env`: what is found, what is missing, and that nothing of it can fail."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from megatron_vp.mcore.platform import environment


def test_parts_are_found_or_said_to_be_missing(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    parts = {part.name: part for part in environment.parts()}
    assert parts["megatron-core"].found == metadata.version("megatron-core")
    assert parts["dataset index"].found == "compiled"
    assert parts["hardware queues"].found is None
    assert all(part.found or part.without for part in parts.values())


def test_a_broken_part_does_not_hide_the_others(monkeypatch):
    def broken():
        raise OSError("libcuda.so.1\nhas the wrong version")

    monkeypatch.setattr(environment, "_PARTS", (("GPU", broken, "slow"), ("SLURM", lambda: "here", "")))
    assert [part.found for part in environment.parts()] == ["broken: libcuda.so.1 has the wrong version", "here"]


def test_the_command_prints_a_line_for_each():
    done = subprocess.run([sys.executable, "-m", "megatron_vp.cli.app", "env"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Transformer Engine" in done.stdout and "SLURM" in done.stdout
