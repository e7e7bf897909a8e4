"""Prints the table in docs/evidence/predictions.md that compares the times of S and T with those of their GEMMs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.ranks.vocab_kernels import LAUNCH, Kernel, ShardPasses
from megatron_vp.schedule import VocabMethod

TOKENS, ROWS, HIDDEN = (2048, 4096), (8192, 32768), (3072, 4096, 6144)
GPUS = ("h100", "h200", "b200")


@dataclass(frozen=True)
class Line:
    """The S and T passes for one shape on one GPU, in bf16 with gradients in fp32."""

    gpu: str
    passes: ShardPasses

    def s_over_gemms(self, method: VocabMethod) -> float:
        """Time of S relative to its GEMMs, of which vocab-1 has one and vocab-2 has two."""
        products = 2 if method is VocabMethod.VOCAB_2 else 1
        return self.passes.output(method)[0] / (products * self.passes.gemm())

    def t_over_gemms(self, method: VocabMethod) -> float:
        """Time of T relative to its GEMMs, of which vocab-1 has two and vocab-2 has one."""
        early = self.passes.gemm() if method is VocabMethod.VOCAB_1 else 0.0
        return self.passes.output(method)[1] / (self.passes.weight_gemm() + early)


def bound(kernel: Kernel) -> str:
    """The resource that limits the kernel."""
    return max({"memory": kernel.memory, "issue": kernel.issue, "launch": LAUNCH}.items(), key=lambda one: one[1])[0]


def lines(
    tokens: Sequence[int] = TOKENS,
    rows: Sequence[int] = ROWS,
    hidden: Sequence[int] = HIDDEN,
    gpus: Sequence[str] = GPUS,
) -> Iterator[Line]:
    """Yield a line for every shape on each of the `gpus`, whose rates must be known."""
    for n in tokens:
        for columns in rows:
            for h in hidden:
                for gpu in gpus:
                    rates = HARDWARE[gpu].rates
                    assert rates is not None
                    yield Line(gpu, ShardPasses(rates, n, columns, h))


def markdown(found: Sequence[Line]) -> str:
    """The table in Markdown, with one line for each shape and GPU."""
    table = [
        "| tokens x rows | h | GPU | GEMM us | softmax: memory us | issue us | bound by "
        "| S vocab-1 | S vocab-2 | T vocab-1 | T vocab-2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in found:
        passes, softmax = line.passes, line.passes.softmax()
        ratios = [
            f"{ratio(method):.2f}"
            for ratio in (line.s_over_gemms, line.t_over_gemms)
            for method in (VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)
        ]
        bounds = [f"{1e6 * seconds:.1f}" for seconds in (softmax.memory, softmax.issue)]
        figures = [f"{1e6 * passes.gemm():.0f}", *bounds, bound(softmax), *ratios]
        cells = [f"{passes.tokens} x {passes.rows}", str(passes.hidden), line.gpu.upper(), *figures]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


if __name__ == "__main__":
    print(markdown(list(lines())), end="")
