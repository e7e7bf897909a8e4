"""Many ranks on one machine, quickly: a server process imports Megatron once and forks the ranks of every case."""

from tests.harness.ranks import RankError, process_group, run_ranks
from tests.harness.training import Run, Step, train

__all__ = ["RankError", "Run", "Step", "process_group", "run_ranks", "train"]
