"""Test `megatron-vp replay`, which runs one rank of a job alone."""

from __future__ import annotations

import contextlib
import io
import math
import threading

import pytest

from megatron_vp.errors import UserError
from megatron_vp.schedule import PassCosts
from tests.harness.ranks import run_ranks

CONFIG = "configs/quickstart.yaml"
SMALL = [
    *("--num-layers", "4", "--hidden-size", "32", "--global-batch-size", "8"),
    *("--seq-length", "32", "--max-position-embeddings", "32"),
]


def _replay(rank, world_size, flags, *, job_rank, ranks=None):
    from megatron_vp.mcore.replay.one_rank import run_alone

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        found = run_alone("pretrain_gpt_vp.py", [CONFIG], job_rank, ranks, 2, [*SMALL, "--vocab-size", "500", *flags])
    assert "NaN" not in said.getvalue()  # its times would be those of other numbers
    # A roll call would ask a store that nobody serves, and hold up the exit until its limit.
    assert not any("watchdog" in thread.name for thread in threading.enumerate())
    return found


def _replay_without_report(rank, world_size):
    from unittest import mock

    from megatron_vp.mcore.start import launch

    with (
        mock.patch.object(launch, "run_script", lambda script, arguments: None),
        pytest.raises(UserError, match="the replayed rank wrote no report"),
    ):
        _replay(rank, world_size, [], job_rank=0)


def test_a_replay_whose_report_was_left_out_says_so():
    run_ranks(1, _replay_without_report)


# The rank of the job, its size, flags, its place in the pipeline, its microbatches, and the passes that it runs.
SPLIT = {"IF", "F", "S", "T", "B", "W", "IB"}
EVEN = ["--vocab-parallel", "--vocab-shards", "even"]
TENSOR_PARALLEL = [*EVEN, "--tensor-model-parallel-size", "2"]
AHEAD_IN_PARTS = [
    *("--vocab-parallel", "--mtp-num-layers", "2", "--position-embedding-type", "rope"),
    *("--context-parallel-size", "2", "--core-attention", "sdpa"),
]
CASES = [
    (0, None, [], 0, 4, {"F", "B"}),
    (1, None, ["--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2"], 1, 4, {"F", "B"}),
    (3, None, EVEN, 3, 4, SPLIT - {"W"}),
    (1, None, ["--vocab-parallel", "--vocab-shards", "0,0,0,512"], 1, 4, {"F", "B"}),
    (6, 8, [*EVEN, "--pipeline-schedule", "zb-h1"], 3, 2, SPLIT),
    (7, None, TENSOR_PARALLEL, 3, 4, SPLIT - {"W"}),
    (3, 8, [], 1, 2, {"F", "B"}),
    pytest.param(0, None, AHEAD_IN_PARTS, 0, 4, SPLIT - {"W"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("job_rank", "ranks", "flags", "pipeline_rank", "microbatches", "kinds"), CASES)
def test_a_rank_runs_its_passes_without_peers(job_rank, ranks, flags, pipeline_rank, microbatches, kinds):
    (found,) = run_ranks(1, _replay, flags, job_rank=job_rank, ranks=ranks)
    assert (found.pipeline_size, found.pipeline_rank, found.microbatches) == (4, pipeline_rank, microbatches)
    assert found.pass_milliseconds.keys() == kinds
    assert all(math.isfinite(value) and value > 0 for value in found.pass_milliseconds.values())
    computed = sum(found.pass_milliseconds.values()) * found.microbatches
    assert computed < 1.5 * found.iteration_milliseconds  # times of a thread, and of the wall
    assert found.memory_bytes["parameters"] == found.memory_bytes["gradients"] > 0
    costs = PassCosts.parse(found.costs())
    for kind in SPLIT:  # nothing is left to the simulator's defaults
        assert getattr(costs, kind) == pytest.approx(found.pass_milliseconds.get(kind, 0), rel=1e-3)


def test_what_is_no_rank_of_the_job_is_refused():
    from megatron_vp.mcore.replay.one_rank import run_alone

    for rank, ranks in ((4, None), (-1, None), (0, 6)):
        with pytest.raises(UserError, match=r"does not fit this job: --ranks must be a multiple of .* = 4 x 1 x 1,"):
            run_alone("pretrain_gpt_vp.py", [CONFIG], rank, ranks, 1, ["--vocab-size", "500"])
    with pytest.raises(UserError, match="--vocab-size N"):
        run_alone("pretrain_gpt_vp.py", [CONFIG], 0, None, 1, [])
    with pytest.raises(UserError, match="--pipeline-model-parallel-size two is not an integer"):
        run_alone("pretrain_gpt_vp.py", [CONFIG], 0, None, 1, ["--pipeline-model-parallel-size", "two"])
    with pytest.raises(UserError, match=r"does not fit this job: .* = 0 x 1 x 1"):
        run_alone("pretrain_gpt_vp.py", [CONFIG], 0, None, 1, ["--pipeline-model-parallel-size", "0"])


def test_an_overlay_counts_for_the_size_of_the_job(tmp_path):
    from megatron_vp.mcore.replay.one_rank import run_alone

    (tmp_path / "overlay.yaml").write_text("parallelism: {pipeline_model_parallel_size: 8}")
    with pytest.raises(UserError, match=r"must be a multiple of .* = 8 x 1 x 1"):
        run_alone("pretrain_gpt_vp.py", [CONFIG, tmp_path / "overlay.yaml"], 9, None, 1, ["--vocab-size", "500"])
