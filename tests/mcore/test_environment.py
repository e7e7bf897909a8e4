"""Test `megatron-vp env`: it lists what is found and what is missing, and never fails."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_vp.mcore.platform import environment


def test_parts_are_found_or_said_to_be_missing(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    parts = {part.name: part for part in environment.parts()}
    assert parts["megatron-core"].found == metadata.version("megatron-core")
    assert parts["hardware queues"].found is None
    assert all(part.found or part.without for part in parts.values())


def test_a_broken_part_does_not_hide_the_others(monkeypatch):
    def broken():
        raise OSError("libcuda.so.1\nhas the wrong version")

    monkeypatch.setattr(environment, "_PARTS", (("GPU", broken, "slow"), ("SLURM", lambda: "here", "")))
    assert [part.found for part in environment.parts()] == ["broken: libcuda.so.1 has the wrong version", "here"]


@pytest.mark.parametrize(
    ("kind", "warned"),
    [
        *(("ext4", False), ("overlay", False), ("fuse.squashfuse", False), ("fuse.fuse-overlayfs", False)),
        *(("nfs4", True), ("lustre", True), ("fuse.gcsfuse", True)),
    ],
)
def test_the_place_of_tritons_cache_is_told_and_a_network_is_warned_of(monkeypatch, kind, warned):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/not/yet")
    monkeypatch.setattr(environment, "_file_system", lambda folder: {Path("/tmp"): kind}[folder])
    part = next(part for part in environment.parts() if part.name == "Triton's cache")
    said = "broken: /tmp/not/yet is on a network file system (" if warned else "/tmp/not/yet ("
    assert part.found == f"{said}{kind})"
    assert part.is_broken == warned and "TRITON_CACHE_DIR" in part.without


def test_the_cache_is_where_triton_looks_for_it(monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in (None, "TRITON_HOME", "TRITON_CACHE_DIR"):
        if name:
            monkeypatch.setenv(name, f"/{name}")
        assert environment.triton_cache().startswith(f"{triton.knobs.cache.dir} (")


def _compiler():
    return next(part for part in environment.parts() if part.name == "C compiler")


def test_the_c_compiler_is_the_one_that_triton_takes(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    for name in ("clang", "gcc"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert _compiler().found == str(command)
    monkeypatch.setenv("CC", f"{tmp_path / 'clang'} -m64")
    assert _compiler().found == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "icx")
    assert _compiler().found == "broken: CC=icx is not a command on this machine: unset CC, or set it to a C compiler"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert _compiler().found is None and "C compiler" in _compiler().without


def test_a_c_compiler_without_pythons_headers_is_not_enough(monkeypatch, tmp_path):
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert _compiler().is_broken and "python3-dev" in _compiler().found


def test_the_command_prints_a_line_for_each():
    done = subprocess.run([sys.executable, "-m", "megatron_vp.cli.app", "env"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Transformer Engine" in done.stdout and "SLURM" in done.stdout
