"""A training job for a launcher that restarts ranks: `DIRECTORY ARGUMENTS...`. It records its results in DIRECTORY.

In the first attempt, one rank is killed.
"""

import multiprocessing
import os
import pickle
import sys
from pathlib import Path


def die_with_children():
    """Megatron's helper processes outlive a rank that is killed, and nobody would end them."""
    from tests.mcore.faults import die

    for child in multiprocessing.active_children():
        child.kill()
    die()


def main():
    """Run one rank."""
    folder, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    import pretrain_gpt_vp as script

    script.prepare()
    from tests.harness.training import train_case
    from tests.mcore.faults import Fault, injected

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault = Fault(die_with_children, 1, "F") if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    with injected(fault, rank), script.one_line_errors():
        run = train_case(rank, ranks, arguments, same_weights=False)
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(run))


if __name__ == "__main__":
    main()
