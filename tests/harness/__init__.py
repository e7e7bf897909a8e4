"""Run many ranks on one machine quickly: a server process imports Megatron once and forks the ranks of every test."""

from tests.harness.ranks import RankError, process_group, run_ranks, run_ranks_to_their_end
from tests.harness.training import Run, Step, train

__all__ = ["RankError", "Run", "Step", "process_group", "run_ranks", "run_ranks_to_their_end", "train"]
