"""Test rows chosen from measured pass times: a slow GPU gets fewer rows, and what is no measurement is refused."""

import json
import math

import pytest

from megatron_vp.cost.planning.measured_rows import measured_rows
from megatron_vp.errors import UserError

VOCAB, RANKS = 131072, 4
JOB = {
    **{"num_layers": 12, "pipeline_model_parallel_size": RANKS, "pipeline_schedule": "1f1b"},
    **{"vocab_parallel_algorithm": "vocab-2", "padded_vocab_size": VOCAB},
}


def seconds(slowness, rows):
    """F and B of one layer's time each, and S and T, which take half of that each for an even share of four."""
    work = slowness * RANKS * rows / VOCAB / 2
    return {"F": slowness, "B": slowness, "S": work, "T": work}


@pytest.fixture
def folder(tmp_path):
    """The reports of a run of JOB whose rank 2 is 5 percent slower."""
    for rank in range(RANKS):
        times = {kind: 4e3 * took for kind, took in seconds(1 + 0.05 * (rank == 2), VOCAB // RANKS).items()}
        report = {
            **{"run": "a", "pipeline_rank": rank, "pipeline_size": RANKS, "parameters": 1, "schedule": "1f1b"},
            **{"vocab": "vocab-2", "peak_microbatches_in_flight": 4, "memory_bytes": {}, "layers": [3] * RANKS},
            **{"sizes": {"num_layers": 12, "padded_vocab_size": VOCAB}, "vocab_rows": [VOCAB // RANKS] * RANKS},
            **{"iteration_milliseconds": [9e3] * 7, "microbatches_by_iteration": [4] * 7},
            "pass_milliseconds_by_iteration": [times] * 7,
        }
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(report))
    return tmp_path


def test_a_slow_rank_gets_fewer_rows_until_all_take_the_same_time(folder):
    layers, rows, gain = measured_rows(folder, JOB, None)
    assert layers == (3,) * RANKS and sum(rows) == VOCAB and all(count % 128 == 0 for count in rows)
    after = [sum(seconds(1 + 0.05 * (rank == 2), count).values()) for rank, count in enumerate(rows)]
    assert rows[2] == min(rows) and max(after) < 1.005 * min(after)
    assert gain == pytest.approx(1.05 * 3 / max(after), rel=5e-3)


WRONG = {
    "another schedule": ({"schedule": "v-half"}, "--pipeline-schedule v-half, but this job has 1f1b: measure a run of"),
    "layers": ({"sizes": {"num_layers": 16}}, "--num-layers 16, but this job has 12"),
    "no rows": ({"vocab_rows": None}, "is not from a run with --vocab-parallel: measure one"),
    "too short": (
        {name: [value] * 5 for name, value in (("iteration_milliseconds", 9e3), ("microbatches_by_iteration", 4))}
        | {"pass_milliseconds_by_iteration": [{"F": 1.0, "B": 1.0, "S": 1.0, "T": 1.0}] * 5},
        "has 4 measured iterations, but 5 are needed",
    ),
    "not a number": ({"pass_milliseconds_by_iteration": [{"F": math.nan}] * 7}, "is not a file that --rank-report"),
    "much slower": (
        {"pass_milliseconds_by_iteration": [{"F": 1e5, "B": 1.0, "S": 1.0, "T": 1.0}] * 7},
        "the times of rank 1 in .* are impossible",
    ),
    "another run": ({"run": "b"}, "contains files of different runs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_measurement_of_this_job_is_refused(folder, name):
    changes, said = WRONG[name]
    for rank in range(RANKS) if "slower" not in name and "run" not in name else (1,):
        path = folder / f"rank_{rank}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=said) as refused:
        measured_rows(folder, JOB, None)
    assert "\n" not in str(refused.value)
