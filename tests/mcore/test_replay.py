"""One rank of a job, alone: `megatron-vp replay`."""

from __future__ import annotations

import math

import pytest

from megatron_vp.errors import UserError
from tests.harness.ranks import run_ranks

CONFIG = "configs/quickstart.yaml"
SMALL = [
    *("--num-layers", "4", "--hidden-size", "32", "--global-batch-size", "8"),
    *("--seq-length", "32", "--max-position-embeddings", "32"),
]


def _replay(rank, world_size, flags, *, job_rank, ranks=None):
    from megatron_vp.mcore.replay import run_alone

    return run_alone("pretrain_gpt_vp.py", [CONFIG], job_rank, ranks, 2, [*SMALL, "--vocab-size", "500", *flags])


# The rank of the job, its size, flags, and the passes that it runs.
CASES = [
    (0, None, [], {"F", "B"}),
    (3, None, ["--vocab-parallel"], {"IF", "F", "S", "T", "B", "IB"}),
    (6, 8, ["--vocab-parallel", "--pipeline-schedule", "zb-h1"], {"IF", "F", "S", "T", "B", "W", "IB"}),
]


@pytest.mark.parametrize(("job_rank", "ranks", "flags", "kinds"), CASES)
def test_a_rank_runs_its_passes_without_peers(job_rank, ranks, flags, kinds):
    (found,) = run_ranks(1, _replay, flags, job_rank=job_rank, ranks=ranks)
    assert (found.pipeline_size, found.microbatches) == (4, 4 if ranks is None else 2)
    assert found.pipeline_rank == (job_rank if ranks is None else job_rank // 2)
    assert found.pass_milliseconds.keys() == kinds
    assert all(math.isfinite(value) and value > 0 for value in found.pass_milliseconds.values())
    computed = sum(found.pass_milliseconds.values()) * found.microbatches
    assert computed < 1.5 * found.iteration_milliseconds  # times of a thread, and of the wall
    assert found.memory_bytes["parameters"] == found.memory_bytes["gradients"] > 0
    assert found.costs().startswith(next(iter(found.pass_milliseconds)) + "=")


def test_what_is_no_rank_of_the_job_is_refused():
    from megatron_vp.mcore.replay import run_alone

    for rank, ranks in ((4, None), (-1, None), (0, 6)):
        with pytest.raises(UserError, match="is no rank of this job: one replica of the model has 4 ranks"):
            run_alone("pretrain_gpt_vp.py", [CONFIG], rank, ranks, 1, ["--vocab-size", "500"])
    with pytest.raises(UserError, match="--vocab-size N"):
        run_alone("pretrain_gpt_vp.py", [CONFIG], 0, None, 1, [])
    with pytest.raises(UserError, match="--pipeline-model-parallel-size two is no integer"):
        run_alone("pretrain_gpt_vp.py", [CONFIG], 0, None, 1, ["--pipeline-model-parallel-size", "two"])
