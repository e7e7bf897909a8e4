"""Write the measurements of tiny CPU runs that the tests of `--vocab-shards measured:DIR` read.

    .venv/bin/python scripts/measured_runs.py     # eight runs of two ranks: a few minutes on two cores

The rank reports are written to tests/cost/measured_runs/.
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.harness.training import tiny_model, train  # noqa: E402

FOLDER = ROOT / "tests" / "cost" / "measured_runs"

RUNS = {
    "1f1b": {},
    "1f1b_rows": {"vocab_shards": "192,320"},
    "1f1b_vocab_1": {"vocab_parallel_algorithm": "vocab-1"},
    "zb_h1": {"pipeline_schedule": "zb-h1"},
    "v_half": {"pipeline_schedule": "v-half"},
    "zb_v": {"pipeline_schedule": "zb-v"},
    "dualpipe_v": {"pipeline_schedule": "dualpipe-v"},
    "interleaved": {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
}
"""The arguments of each run, in addition to those that all runs share."""


def main() -> None:
    """Train each run, and keep its reports."""
    for name, changes in RUNS.items():
        folder = FOLDER / f"{name}_report"
        shutil.rmtree(folder, ignore_errors=True)
        job = {"pipeline_model_parallel_size": 2, "vocab_parallel": True, "train_iters": 8, "global_batch_size": 4}
        train(2, tiny_model(**job | changes | {"rank_report": folder}))


if __name__ == "__main__":
    main()
