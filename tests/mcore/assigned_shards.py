"""Test cases for vocabulary shards of any size: a case is a schedule, rows by pipeline rank, and Megatron's options."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.mcore.case_parts import AHEAD, BOTH, DISTRIBUTED, GROUPS, SEQUENCE, TENSOR, TIED

VOCABULARY = 40
"""Rows of `comparable_model`, as they are padded for one and for two tensor ranks."""

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min")
_CHUNKS = {"interleaved": 2, "zb-v": 2, "v-half": 2, "v-min": 2}


@dataclass(frozen=True)
class Shards:
    """A run with assigned shards.

    schedule, method: family, and vocab-1 or vocab-2.
    rows: by pipeline rank, the tensor ranks of a stage together.
    options: long argument names with underscores, for plain Megatron on the same ranks and for our run.
    tensor, data: sizes of tensor and data parallelism.
    """

    schedule: str
    method: str
    rows: tuple[int, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    tensor: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return len(self.rows) * self.tensor * self.data

    @property
    def common(self) -> dict[str, object]:
        """Arguments of both runs."""
        stages = len(self.rows) * _CHUNKS.get(self.schedule, 1)
        return {
            "num_layers": stages * (1 if stages > 4 else 2),
            "train_iters": 3,
            "global_batch_size": 2 * (len(self.rows) + 2) * self.data,
            "pipeline_model_parallel_size": len(self.rows),
            **self.options,
        }

    @property
    def ours(self) -> dict[str, object]:
        """Arguments of our run alone."""
        return {
            "vocab_parallel": True,
            "vocab_parallel_algorithm": self.method,
            "pipeline_schedule": self.schedule,
            "num_virtual_stages_per_pipeline_rank": 2 if self.schedule == "interleaved" else None,
            "vocab_shards": ",".join(map(str, self.rows)),
        }

    def __str__(self) -> str:
        words = [f"{self.schedule}/{self.method}", ",".join(map(str, self.rows))]
        words += ["tied"] * self.tied + [f"t{self.tensor}"] * (self.tensor > 1) + [f"d{self.data}"] * (self.data > 1)
        return " ".join(words)

    @property
    def tied(self) -> bool:
        """Whether both layers share one weight."""
        return self.options.get("untie_embeddings_and_output_weights") is False


BY_DEFAULT = (
    Shards("1f1b", "vocab-2", (0, 40), {**TIED, **GROUPS}),
    Shards("v-half", "vocab-1", (0, 26, 14), BOTH),
)
"""A rank without rows at an end and in a V; tied and untied; what a rank without rows shares with others."""

CHOSEN = (
    Shards("interleaved", "vocab-2", (40, 0), {**SEQUENCE, **BOTH, **TIED}, tensor=2),
    Shards("1f1b", "vocab-1", (23, 0, 0, 17)),
    Shards("zb-h1", "vocab-2", (0, 31, 9, 0), TIED),
    Shards("1f1b", "vocab-2", (0, 24, 16), AHEAD),
    Shards("v-half", "vocab-2", (0, 40), {**AHEAD, **TIED}),
    Shards("1f1b", "vocab-2", (8, 32), {**SEQUENCE, **BOTH}, tensor=2, data=2),
    Shards("v-half", "vocab-2", (0, 40), {**TENSOR, **BOTH, **TIED}, tensor=2, data=2),
    Shards("zb-v", "vocab-1", (40, 0), {**SEQUENCE, **AHEAD}, tensor=2),
    Shards("1f1b", "vocab-2", (0, 22, 18), {"pipeline_model_parallel_layout": "Ettt|t|ttL", "num_layers": 6}),
)


def random_shards(number: int) -> Shards:
    """The case of this number, on at most 8 ranks."""
    chance = random.Random(number)
    schedule = SCHEDULES[number % len(SCHEDULES)]
    method = ("vocab-1", "vocab-2")[number // len(SCHEDULES) % 2]
    ranks = chance.choice((2, 3, 4))
    tensor = 2 if ranks < 4 and chance.random() < 0.35 else 1
    data = 2 if 2 * ranks * tensor <= 8 and chance.random() < 0.4 else 1
    unit = 2 * tensor
    cuts = sorted(chance.randint(0, VOCABULARY // unit) * unit for _ in range(ranks - 1))
    rows = [end - start for start, end in zip([0, *cuts], [*cuts, VOCABULARY], strict=True)]
    if chance.random() < 0.5:  # random ends of shards seldom meet
        rows[chance.randrange(ranks)] = 0
        rows[max(range(ranks), key=rows.__getitem__)] += VOCABULARY - sum(rows)
    options: dict[str, object] = {}
    if tensor > 1:
        options |= chance.choice((TENSOR, SEQUENCE))
    if data > 1 or chance.random() < 0.3:
        options |= chance.choice((BOTH, DISTRIBUTED))
    if chance.random() < 0.5:
        options |= TIED
    return Shards(schedule, method, tuple(rows), options, tensor, data)


RANDOM = tuple(random_shards(number) for number in range(48))
