"""Write the CSV files of this folder with PyTorch's own schedules: `python -m tests.mcore.schedules.from_pytorch`.

No process group is needed, because a schedule only asks its stages for their place in the pipeline.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.pipelining import schedules

RANKS = 2


class Stage:
    """Place of a stage on rank 0; whatever else a schedule asks for is None."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.num_stages = index, 2 * RANKS
        self.group_size, self.group_rank = RANKS, 0
        self.is_first, self.is_last = index == 0, index == 2 * RANKS - 1
        self.has_backward, self.device = True, torch.device("cpu")

    def __getattr__(self, name: str) -> None:
        return None


def write(kind: type, second_stage: int, microbatches: int, name: str) -> None:
    """The compute actions of a schedule, one line per rank."""
    stages = [Stage(0), Stage(second_stage)]
    schedule = kind(stages, microbatches, loss_fn=lambda output, target: None)
    schedule._dump_csv(str(Path(__file__).parent / name), format="compute_only")


if __name__ == "__main__":
    write(schedules.ScheduleInterleaved1F1B, RANKS, 4, "torch_interleaved_1f1b.csv")
    write(schedules.ScheduleZBVZeroBubble, 2 * RANKS - 1, 4, "torch_zbv.csv")
    write(schedules.ScheduleDualPipeV, 2 * RANKS - 1, 5, "torch_dualpipe_v.csv")
