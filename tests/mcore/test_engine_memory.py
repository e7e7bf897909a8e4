"""What Transformer Engine's layers hold from B to W, counted by a replay without numbers over its own Python."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest

from tests.harness.ranks import ROOT, run_ranks
from tests.mcore.engine import NEWEST, on_cpu, require

HIDDEN, SEQUENCE, BATCH = 64, 128, 4
JOB = [
    *("--num-layers", "8", "--hidden-size", str(HIDDEN), "--num-attention-heads", "4", "--vocab-size", "500"),
    *("--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE), "--num-workers", "0", "--bf16"),
    *("--micro-batch-size", str(BATCH), "--global-batch-size", str(16 * BATCH), "--clip-grad", "0"),
    *("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--transformer-impl", "transformer_engine", "--attention-backend", "unfused", "--pipeline-schedule", "v-min"),
]
HALF_AN_INPUT = SEQUENCE * BATCH * HIDDEN * 2 // 2


def peak(_rank: int, _world_size: int, parts: bool) -> int:
    """The most bytes on rank 0 of the job; without `parts` gathered inputs are kept whole."""
    with on_cpu(NEWEST, True), ExitStack() as changed:
        from megatron.training import training

        from megatron_vp.mcore.replay.one_rank import run_alone
        from megatron_vp.mcore.training import schedule

        # With Transformer Engine the norm stays on the device, and Megatron makes a new tensor of its number.
        no_norm = mock.patch.object(training, "reduce_max_stat_across_model_parallel_group", lambda *_, **__: 0.0)
        changed.enter_context(no_norm)
        if not parts:
            changed.enter_context(mock.patch.object(schedule, "late_weights", lambda *_: frozenset()))
        config = str(ROOT / "configs" / "quickstart.yaml")
        script = str(ROOT / "pretrain_gpt_vp.py")
        return run_alone(script, [config], 0, None, 1, JOB, shapes_only=True).memory_bytes["peak"]


@pytest.mark.slow
def test_gathered_inputs_are_kept_in_parts_until_a_late_w():
    require(NEWEST)
    (whole,), (parts,) = run_ranks(1, peak, False, timeout=300), run_ranks(1, peak, True, timeout=300)
    saved = whole - parts
    # A chunk has two layers of two column-parallel products each, whose inputs are gathered over two ranks.
    assert saved >= 4 * HALF_AN_INPUT and saved % HALF_AN_INPUT == 0, saved
