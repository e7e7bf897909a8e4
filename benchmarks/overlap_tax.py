"""Measure how much concurrent communication slows passes down: F and B of a few layers, with and without NCCL kernels.

    python benchmarks/overlap_tax.py [--tokens 4096] [--hidden 4096] [--layers 4] [--output FILE.jsonl]

One GPU has no peers, so a kernel with a fixed number of thread blocks replaces NCCL's. The kinds of kernels and copies
are:

    copy    moves X, [n, h] in 16 bits, from one buffer to another, like C0 during F, or C1 of vocab-2 during B. It ends
            long before the pass
    held    waits until the pass has ended, as a receive waits for its message. A rank in the middle of a pipeline has
            about one receive waiting at all times, so this is the tax that every pass pays

    to-host, from-host    copies `--copy-mib` MiB to pinned host memory or back, as `--offload-chunks` does. It uses no
            multiprocessor. `behind` is the delay of a small kernel that is issued after two such copies, of which the
            second waits for the first: with one hardware queue, the second may block the kernel

The kernels and copies run on the runtime's own second stream, with its events. This shows the cost of the occupied
multiprocessors and of the memory traffic. It cannot show traffic between devices, or how many registers and how much
shared memory NCCL's own blocks take from a GEMM. Every line is one kind and one number of thread blocks. All are
measured in turns in one process, and the tax is a ratio of medians. The aim is a tax of at most 2 percent for `held`,
and a copy that is shorter than the shorter pass; this decides `CTAS` and `EDGE_CTAS` (`megatron_vp/runtime/groups.py`).
Run it with several values of CUDA_DEVICE_MAX_CONNECTIONS. Without a GPU, it runs tiny sizes in Triton's interpreter,
and the times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from measuring import milliseconds, write  # noqa: E402
from torch.nn.functional import gelu, scaled_dot_product_attention  # noqa: E402

from megatron_vp.runtime.groups import CTAS  # noqa: E402
from megatron_vp.runtime.streams import Event, second_stream  # noqa: E402

KINDS = ("copy", "held")
HOST_KINDS = ("to-host", "from-host")
HEAD = 128 if ON_GPU else 8
POLLS = 1 << 24 if ON_GPU else 50
"""After polling the flag this many times, about ten seconds on a GPU, a waiting block gives up, so that nothing can
hang.
"""


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    """Copy elements, which all launched programs share block by block."""
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        here = start + tl.arange(0, BLOCK)
        tl.store(target + here, tl.load(source + here, mask=here < count), mask=here < count)


@triton.jit
def hold(flag, left, polls):
    """Let every program occupy its multiprocessor until the flag is set; `left` gets the number of unused polls."""
    remaining = polls
    while (tl.load(flag, volatile=True) == 0) & (remaining > 0):
        remaining -= 1
    tl.store(left + tl.program_id(0), remaining)


class Layer(torch.nn.Module):
    """The GEMMs and the attention of a transformer layer."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        super().__init__()
        sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        self.query_key_value, self.projection, self.up, self.down = (
            torch.nn.Linear(*size, bias=False, device=device, dtype=torch.bfloat16) for size in sizes
        )

    def forward(self, x_nh: torch.Tensor) -> torch.Tensor:
        """Run the layer on [n, h] of one sequence; return [n, h]."""
        # With fewer than four dimensions, [1, heads, n, d], PyTorch would not use a fused kernel.
        heads = self.query_key_value(x_nh).view(1, len(x_nh), 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        attended_1nsd = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x_nh = x_nh + self.projection(attended_1nsd.flatten(2)[0])
        return x_nh + self.down(gelu(self.up(x_nh)))


class Passes:
    """Runs F and B of some layers, with or without a concurrent kernel that stands for NCCL's."""

    def __init__(self, tokens: int, hidden: int, layers: int, copy_mib: int, device: torch.device) -> None:
        self.device = device
        self.on_device = torch.zeros(copy_mib * 2**20, dtype=torch.uint8, device=device)
        self.on_host = torch.zeros(copy_mib * 2**20, dtype=torch.uint8, pin_memory=ON_GPU)
        self.x_nh = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.layers = torch.nn.Sequential(*(Layer(hidden, device) for _ in range(layers)))
        self.gradient_nh = torch.randn_like(self.x_nh)
        self.source, self.target = (torch.randn_like(self.x_nh, requires_grad=False) for _ in range(2))
        self.stream = second_stream(device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.left = torch.ones(64, dtype=torch.int32, device=device)
        self.gave_up = False
        """Whether a block gave up before the end of a pass, whose time is then invalid."""

    def post(self, kind: str, blocks: int) -> Event | None:
        """Start a kernel or a copy on the second stream; `kind` is in `KINDS` or `HOST_KINDS`."""
        if not blocks:
            return None
        if kind in HOST_KINDS:
            ways = (self.on_host, self.on_device) if kind == "to-host" else (self.on_device, self.on_host)
            return self.stream.submit(lambda: ways[0].copy_(ways[1], non_blocking=True))
        if kind == "held":
            return self.stream.submit(lambda: hold[(blocks,)](self.flag, self.left, POLLS, num_warps=16))
        count = self.source.numel()
        return self.stream.submit(lambda: copy[(blocks,)](self.source, self.target, count, BLOCK=16384, num_warps=16))

    def run(self, kind: str, blocks: int) -> tuple[float, float]:
        """The milliseconds of F and of B, each to its own end; only then is the end of the other kernel awaited."""

        def beside(work: Callable[[], object]) -> float:
            events = []
            self.flag.zero_()

            def both() -> None:
                events.append(self.post(kind, blocks))
                work()
                self.flag.fill_(1)  # even without blocks, so that both times include this launch

            took = milliseconds(both, self.device)
            if events[0] is not None:
                events[0].wait()
                self.gave_up |= kind == "held" and not self.left[:blocks].all().item()
            return took

        outputs: list[torch.Tensor] = []
        forward = beside(lambda: outputs.append(self.layers(self.x_nh)))
        backward = beside(lambda: outputs[0].backward(self.gradient_nh))
        for parameter in (self.x_nh, *self.layers.parameters()):
            parameter.grad = None
        return forward, backward

    def alone(self, kind: str, blocks: int) -> float:
        """The milliseconds of a copy without concurrent work."""
        return milliseconds(lambda: self.post(kind, blocks).wait(), self.device)

    def behind(self, kind: str, copies: int) -> float:
        """The milliseconds until a small kernel that is issued after this many copies has ended."""
        events: list[Event | None] = []

        def issue() -> None:
            events.extend(self.post(kind, 1) for _ in range(copies))
            self.flag.zero_()

        took = milliseconds(issue, self.device)
        for event in events:
            if event is not None:
                event.wait()
        return took


def main() -> int:
    """Measure, and print or append to a file one line of JSON per choice. Returns 1 if a block did not wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, here, tried in (("tokens", 4096, 16), ("hidden", 4096, 16), ("layers", 4, 1), ("rounds", 20, 1)):
        parser.add_argument(f"--{name}", type=int, default=here if ON_GPU else tried)
    parser.add_argument("--blocks", default=f"1,2,{CTAS},8,16,32", help="thread blocks, comma-separated, at most 64")
    parser.add_argument("--copy-mib", type=int, default=256 if ON_GPU else 1, help="size of a copy to the host")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    device = torch.device("cuda" if ON_GPU else "cpu")
    passes = Passes(args.tokens, args.hidden, args.layers, args.copy_mib, device)
    choices = [("nothing", 0), *product(KINDS, map(int, args.blocks.split(","))), *product(HOST_KINDS, [1])]
    times: dict[tuple[str, int], list[tuple[float, float]]] = {choice: [] for choice in choices}
    for _ in range(args.rounds + 2):
        for choice in choices:
            times[choice].append(passes.run(*choice))
    # The first two rounds only warm up.
    medians = {
        choice: [statistics.median(part) for part in zip(*taken[2:], strict=True)] for choice, taken in times.items()
    }
    forward, backward = medians[choices[0]]
    for kind, blocks in choices[1:]:
        copied = None
        if kind != "held":
            copied = statistics.median(passes.alone(kind, blocks) for _ in range(args.rounds))
        moved = passes.on_device.numel() if kind in HOST_KINDS else 2 * passes.source.numel()
        line = {
            "machine": torch.cuda.get_device_name() if ON_GPU else "no GPU: times mean nothing",
            "torch": torch.__version__,
            "hardware_queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
            "tokens": args.tokens,
            "hidden": args.hidden,
            "layers": args.layers,
            "kind": kind,
            "blocks": blocks,
            "forward_tax": medians[kind, blocks][0] / forward - 1,
            "backward_tax": medians[kind, blocks][1] / backward - 1,
            "copy_gb_per_s": 1e-6 * moved / copied if copied else None,
            "milliseconds": {"forward": forward, "backward": backward, "copy": copied},
        }
        if kind in HOST_KINDS:
            behind, without = (
                statistics.median(passes.behind(kind, copies) for _ in range(args.rounds)) for copies in (2, 0)
            )
            line["behind_ms"] = behind - without
        write(line, args.output)
    if torch.full((1,), 0.125, device=device).item() != 0.125:
        print("this device runs no kernel, so its figures mean nothing")
        return 0
    if passes.gave_up:
        print("a block gave up before its pass had ended: the taxes of `held` are too low")
    return int(ON_GPU and passes.gave_up)


if __name__ == "__main__":
    sys.exit(main())
