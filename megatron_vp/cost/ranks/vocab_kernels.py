"""Computes the times of S, T, IF and IB from the times of their GEMMs and of this project's kernels.

S computes the logits Y = X W^T, where X is the output layer's input and W the rank's shard of the weight, then runs a
softmax kernel that overwrites Y with exponentials E. T runs a kernel that enters the targets into E and scales X, which
gives E' and X', then computes the weight gradient E'^T X'. With vocab-2, S also computes E W, whose rows are rescaled
in the barrier after S. With vocab-1, T computes and rescales E W. IF looks up embedding rows, and IB adds up their
gradients.

The time of a kernel that is not a GEMM is the time to move its bytes at the speed of a copy or the time to issue its
instructions at the issue rate, whichever is longer. Nothing here was measured: bytes were counted in the source code,
and instructions in the machine code for compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.cost.hardware.gpus import Rates
from megatron_vp.schedule import VocabMethod

LAUNCH = 2.5e-6
"""Fixed seconds per kernel that is not a GEMM: its start-up, its tail and the gap before it."""

ISSUE_SHARE = 0.75
"""Assumed fraction of `Rates.issue` that the non-GEMM kernels of S and T reach."""

LONGEST_ROW = 32_768
"""Length in logits of the longest row that fits in registers and is read only once; longer rows are read twice."""

WHOLE_ROW_INSTRUCTIONS, LONG_ROW_INSTRUCTIONS = 16, 13
"""Instructions per logit in the softmax: for rows of up to LONGEST_ROW logits, and for longer rows. Each number is the
maximum over the row lengths that need no mask.
"""

RESCALE_INSTRUCTIONS, TARGET_INSTRUCTIONS = 20, 16
"""Instructions per element to rescale E W, and to scale the rows of X in T."""

ADD_LAUNCHES = 4
"""Number of kernels in IB: two PyTorch kernels find the rows of owned tokens, and two Triton kernels add up the
gradients of these rows.
"""


@dataclass(frozen=True)
class Kernel:
    """Seconds that a kernel other than a GEMM needs for each resource that could limit it."""

    memory: float
    issue: float

    @property
    def seconds(self) -> float:
        """Seconds that the kernel takes, including its launch."""
        return LAUNCH + max(self.memory, self.issue)


@dataclass(frozen=True)
class ShardPasses:
    """The vocabulary passes of one microbatch over one shard.

    element_bytes: bytes of an element of logits, X and weights.
    gradient_bytes: bytes of an element of the accumulated weight gradient.
    """

    rates: Rates
    tokens: int
    rows: int
    hidden: int
    element_bytes: int = 2
    gradient_bytes: int = 4

    def gemm(self, weight_bytes: float = 0.0) -> float:
        """Seconds of X W^T or of E W, or of another GEMM with `weight_bytes` bytes per element of a matrix of W's
        shape.
        """
        tokens, rows, hidden = self.tokens, self.rows, self.hidden
        moved = self.element_bytes * tokens * (hidden + rows) + (weight_bytes or self.element_bytes) * rows * hidden
        return max(2 * tokens * rows * hidden / self.rates.gemm, moved / self.rates.copy)

    def weight_gemm(self) -> float:
        """Seconds of E'^T X', including reading and writing the accumulated gradient to which the product is added."""
        return self.gemm(2 * self.gradient_bytes)

    def softmax(self) -> Kernel:
        """The softmax kernel, which computes statistics of every row and writes E over the logits."""
        whole = self.rows <= LONGEST_ROW
        instructions = WHOLE_ROW_INSTRUCTIONS if whole else LONG_ROW_INSTRUCTIONS
        return self._kernel((2 if whole else 3) * self.element_bytes, instructions, self.tokens * self.rows)

    def scaled_rows(self, instructions: float) -> float:
        """Seconds of a kernel that scales rows of hidden size, one for each token."""
        return self._kernel(2 * self.element_bytes, instructions, self.tokens * self.hidden).seconds

    def _kernel(self, moved: float, instructions: float, elements: float) -> Kernel:
        issue = instructions * elements / (self.rates.issue * ISSUE_SHARE)
        return Kernel(moved * elements / self.rates.copy, issue)

    def output(self, method: VocabMethod) -> tuple[float, float]:
        """Seconds of S and T. With vocab-2, the time of S includes the rescaling of E W in the barrier after S."""
        scores = self.gemm() + self.softmax().seconds
        gradients = self.scaled_rows(TARGET_INSTRUCTIONS) + self.weight_gemm()
        early = self.gemm() + self.scaled_rows(RESCALE_INSTRUCTIONS)
        return (scores + early, gradients) if method is VocabMethod.VOCAB_2 else (scores, gradients + early)

    def embedding(self, shards: float) -> tuple[float, float]:
        """Seconds of IF and IB on a rank that owns 1 / `shards` of the vocabulary and of the tokens."""
        owned = self.tokens * self.hidden / shards
        looked_up = LAUNCH + 2 * self.element_bytes * owned / self.rates.copy
        added = (self.element_bytes + 2 * self.gradient_bytes) * owned / self.rates.copy
        return looked_up, ADD_LAUNCHES * LAUNCH + added

    def placed_rows(self) -> float:
        """Seconds that the first stage takes to put rows sorted by owner into token order, or to sort them by owner."""
        return LAUNCH + 2 * self.element_bytes * self.tokens * self.hidden / self.rates.copy
