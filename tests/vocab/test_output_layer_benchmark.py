"""Test that a failure in the benchmark of S and T gives one line and leaves all others intact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import output_layer  # noqa: E402

SIZES = ["--tokens", "16", "--hidden", "16", "--rounds", "1"]


def test_a_rival_that_cannot_be_imported_is_named_with_its_reason(tmp_path):
    package = tmp_path / "liger_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('made for another Triton')")
    results = tmp_path / "results.jsonl"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, str(BENCHMARKS / "output_layer.py"), *SIZES, "--rows", "16", "--output", str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, results.read_text().splitlines())
    assert line["error"]["liger"] == "ImportError: made for another Triton"
    assert line["s_over_gemm"] > 0


def test_a_shape_that_fails_costs_no_other(tmp_path, monkeypatch):
    measure, results = output_layer.measure, tmp_path / "results.jsonl"

    def fail_at_24_rows(shape, *arguments):
        if len(shape.layer.weight) == 24:
            raise torch.OutOfMemoryError("too many rows")
        return measure(shape, *arguments)

    monkeypatch.setattr(output_layer, "measure", fail_at_24_rows)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the benchmark sets, restored afterwards
    monkeypatch.setattr(sys, "argv", ["output_layer.py", *SIZES, "--rows", "24,16", "--output", str(results)])
    assert output_layer.main() == 1
    first, second = map(json.loads, results.read_text().splitlines())
    assert first["failed"] == "OutOfMemoryError: too many rows"
    assert "s_over_gemm" not in first and second["s_over_gemm"] > 0


def test_a_rival_that_fails_at_full_size_is_left_out(monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("too many tokens")

    shape = output_layer.Shape(16, 16, 16, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(shape, "rivals", lambda: {"other": fail})
    found = output_layer.measure(shape, ["other"], 1, torch.device("cpu"))
    assert found["rivals_failed"] == {"other": "OutOfMemoryError: too many tokens"}
    assert found["rivals_over_ours"] == {}


def test_t_is_always_timed_on_e_as_s_has_left_it(monkeypatch):
    """In fp16 T scales the rows with targets: after some rounds on one E they would be zeros, which multiply faster."""
    shape = output_layer.Shape(16, 16, 64, torch.device("cpu"), torch.float16, shards=1)
    fresh_nv, t, rounds = shape.pending.exp_nv.clone(), shape.t, 2

    def noted():
        nonlocal rounds
        rounds += torch.equal(shape.pending.exp_nv, fresh_nv)
        t()
        assert not torch.equal(shape.pending.exp_nv, fresh_nv)

    monkeypatch.setattr(shape, "t", noted)
    output_layer.measure(shape, [], rounds, torch.device("cpu"))
    assert rounds == 2 + 2 * (2 + 2), "every time, warming up included, with a clean L2 and with a dirty one"


def test_the_aim_is_the_gemm_the_bytes_and_the_launch():
    tokens, hidden, rows = 32, 24, 40
    shape = output_layer.Shape(tokens, hidden, rows, torch.device("cpu"), torch.float32)
    found = output_layer.measure(shape, [], 2, torch.device("cpu"))
    copy, took = found["copy_bytes_per_second"], found["milliseconds"]
    for part, elements in (("s", tokens * rows), ("t", tokens * hidden)):
        aim = took[f"{part}_gemm"] + 2 * 4 * elements / copy * 1e3 + 2.5e-3
        assert abs(found[f"{part}_over_aim"] * aim / took[part] - 1) < 1e-6
    sustained = found["sustained"]["milliseconds"]
    assert found["sustained"]["s_over_gemm"] == sustained["s"] / sustained["s_gemm"]
