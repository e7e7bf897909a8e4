"""Write rank reports in the format of a run, for tests of the code that reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

ITERATIONS = 7


def write_reports(
    folder: Path,
    times: Sequence[Mapping[str, float]],
    rows: Sequence[int],
    microbatches: int = 5,
    **changes: object,
) -> Path:
    """Reports of a run whose rank r takes times[r] milliseconds per microbatch, by kind of pass.

    The first of ITERATIONS takes nine times as long. `changes` replace entries of all reports.
    """
    folder.mkdir(exist_ok=True)
    for rank, own in enumerate(times):
        each = {kind: microbatches * took for kind, took in own.items()}
        document = {
            "run": "0123456789abcdef",
            "schedule": "1f1b",
            "vocab": "vocab-2",
            "pipeline_rank": rank,
            "parameters": 1000,
            "memory_bytes": {},
            "peak_microbatches_in_flight": 1.0,
            "iteration_milliseconds": [1e4] * ITERATIONS,
            "microbatches_by_iteration": [microbatches] * ITERATIONS,
            "pass_milliseconds_by_iteration": [{kind: 9 * took for kind, took in each.items()}]
            + [each] * (ITERATIONS - 1),
            "layers": None,
            "vocab_rows": list(rows),
            "tensor": 1,
            "sizes": {"padded_vocab_size": sum(rows)},
        }
        (folder / f"rank_{rank}.json").write_text(json.dumps(document | changes))
    return folder
