"""Test `megatron-vp env`: it lists what is found and what is missing, and never fails."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from megatron_vp.mcore.platform import environment, triton_start


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


@pytest.fixture
def mounts(monkeypatch, tmp_path):
    """A machine with these file systems."""
    file = tmp_path / "mounts"
    file.write_text(
        "overlay / overlay rw 0 0\n"
        "server:/home /home nfs4 rw,vers=4.2 0 0\n"
        "old /home/scratch nfs rw 0 0\n"
        "/dev/sdb /home/scratch ext4 rw 0 0\n"
        "fast /home/with\\040space lustre rw 0 0\n"
        "bucket /data fuse.gcsfuse rw 0 0\n"
        "image /image fuse.squashfuse ro 0 0\n"
    )
    monkeypatch.setattr(triton_start, "_MOUNTS", file)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/tmp/triton", "/tmp/triton (overlay)"),
        ("/home/me/triton", "broken: /home/me/triton is on a network file system (nfs4)"),
        ("/homes/triton", "/homes/triton (overlay)"),
        ("/home/scratch/triton", "/home/scratch/triton (ext4)"),
        ("/home/with space/triton", "broken: /home/with space/triton is on a network file system (lustre)"),
        ("/data/triton", "broken: /data/triton is on a network file system (fuse.gcsfuse)"),
        ("/image/triton", "/image/triton (fuse.squashfuse)"),
    ],
)
def test_the_place_of_tritons_cache_is_told_and_a_network_is_warned_of(monkeypatch, mounts, folder, said):
    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    part = next(part for part in environment.parts() if part.name == "Triton's cache")
    assert part.found == said
    assert part.is_broken == ("network" in said) and "TRITON_CACHE_DIR" in part.without


def test_the_cache_is_where_triton_looks_for_it(monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert str(triton_start.cache_folder()) == triton.knobs.cache.dir
    monkeypatch.setenv("TRITON_HOME", "/somewhere")
    assert str(triton_start.cache_folder()) == triton.knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert str(triton_start.cache_folder()) == triton.knobs.cache.dir == "/elsewhere"


def test_a_machine_that_does_not_list_its_mounts(monkeypatch, tmp_path):
    monkeypatch.setattr(triton_start, "_MOUNTS", tmp_path / "none")
    assert triton_start.cache().endswith("(file system unknown)")


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
    monkeypatch.setattr(triton_start.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert _compiler().is_broken and "python3-dev" in _compiler().found


def test_the_command_prints_a_line_for_each():
    done = subprocess.run([sys.executable, "-m", "megatron_vp.cli.app", "env"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Transformer Engine" in done.stdout and "SLURM" in done.stdout
