"""Find out which host calls wait until the CUDA device is idle, and which of them also stop other Python threads.

    python benchmarks/waits.py [--output FILE]

A kernel that sleeps for SECONDS on a separate stream stands for an operation that waits for its peer. While it runs,
every call below is made once. If a call returns only after the sleep has ended, it waited for the device; in a pipeline
it would stall the rank until the peer's message has come. To keep compilers from taking that long, the kernels come
from PyTorch's libraries, and Triton's own kernels are compiled beforehand. A thread that ticks meanwhile shows whether
the call holds Python's global lock, which would also stop the watchdog.

The script only measures: its exit status is always 0. It takes half a minute. Without a CUDA device, it says so and
exits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # must be set before CUDA starts; loads kernels at first use

import torch
import torch.distributed as dist
import triton
import triton.language as tl

SECONDS = 0.8
TICK = 0.001

Call = Callable[[], object]


@triton.jit
def add_count(numbers, count, BLOCK: tl.constexpr):
    """Add `count` to the first `count` numbers; Triton specialises this for counts that are multiples of 16."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(numbers + lane, tl.load(numbers + lane, mask=lane < count) + count, mask=lane < count)


class Sleeper:
    """A stream on which a kernel sleeps, and a thread that counts how often it can run."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tried = 100_000_000
        begin.record()
        torch.cuda._sleep(tried)
        end.record()
        end.synchronize()
        self._cycles = int(tried * SECONDS * 1e3 / begin.elapsed_time(end))
        self.behind = torch.cuda.Event()
        self._ticks = 0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            self._ticks += 1
            time.sleep(TICK)

    def watch(self, name: str, call: Call) -> dict[str, object]:
        """Make a call while the kernel sleeps; return its duration and whether other threads ran."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)
            self.behind.record()
        ticks, start = self._ticks, time.perf_counter()
        error = None
        try:
            kept = call()
        except Exception as caught:
            kept, error = None, f"{type(caught).__name__}: {str(caught)[:80]}"
        seconds = time.perf_counter() - start
        waits = seconds > SECONDS / 2 and self.behind.query()
        ran = self._ticks - ticks
        torch.cuda.synchronize()
        del kept
        return {
            "call": name,
            "waits": waits,
            "milliseconds": round(1e3 * seconds, 2),
            "keeps_lock": waits and ran < seconds / TICK / 10,
            "error": error,
        }


def calls(sleeper: Sleeper) -> Iterator[tuple[str, Call]]:
    """Yield the calls to watch, each in a state in which it has something to do for the first time."""
    numbers = torch.ones(1 << 20, device="cuda")
    passed, aside = torch.cuda.Event(), torch.cuda.Stream()
    passed.record()
    passed.synchronize()
    cached = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del cached

    def on_another_stream() -> torch.Tensor:
        with torch.cuda.stream(aside):
            return torch.atan(numbers[:64])

    def product() -> torch.Tensor:
        square = numbers[:4096].view(64, 64).bfloat16()
        return square @ square

    yield "query of a passed event", passed.query
    yield "query of an event behind the sleep", sleeper.behind.query
    yield "record of a new event", lambda: torch.cuda.Event().record()
    yield "a new stream", torch.cuda.Stream
    yield "allocation from the cache", lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    yield "allocation of 3 GiB (cudaMalloc)", lambda: torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    yield "empty_cache (cudaFree)", torch.cuda.empty_cache
    yield "pinned allocation of 16 MiB", lambda: torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
    yield "64 pinned allocations of 80 bytes", lambda: [torch.empty(80, pin_memory=True) for _ in range(64)]
    yield "copy from pageable memory", lambda: numbers.copy_(torch.ones(1 << 20), non_blocking=True)
    yield "first use of a kernel (sinh)", lambda: torch.sinh(numbers[:64])
    yield "first use of a kernel on another stream (atan)", on_another_stream
    yield "first stable sort of 100 numbers", lambda: torch.arange(100, device="cuda").sort(stable=True)
    yield "first stable sort of 5,000 numbers", lambda: torch.arange(5000, device="cuda").sort(stable=True)
    yield "first GEMM in bf16 (cuBLAS)", product
    add_count[(8,)](numbers, 1 << 20, BLOCK=1024)
    add_count.warmup(numbers, (1 << 20) - 1, grid=(8,), BLOCK=1024)  # compiles without loading
    yield "Triton, a new specialisation", lambda: add_count[(8,)](numbers, (1 << 20) - 1, BLOCK=1024)
    yield "Triton, the same once more", lambda: add_count[(8,)](numbers, (1 << 20) - 1, BLOCK=1024)
    yield "item() of the compute stream", lambda: numbers[0].item()
    if dist.is_nccl_available():
        yield "NCCL: start", lambda: dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield "NCCL: first operation of a communicator", lambda: dist.all_reduce(numbers[:4])
        yield "NCCL: its second operation", lambda: dist.all_reduce(numbers[:4])
        yield "NCCL: new group, first operation", lambda: dist.all_reduce(numbers[:4], group=dist.new_group([0]))
    yield "synchronize, which must wait", torch.cuda.synchronize


def main() -> None:
    """Watch all calls, and print a line per call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", help="append a line of JSON per call to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Triton {triton.__version__}")
    sleeper = Sleeper()
    for name, call in calls(sleeper):
        row = sleeper.watch(name, call)
        words = "WAITS" if row["waits"] else "goes on"
        lock = ", other threads stand still" if row["keeps_lock"] else ""
        error = f" ({row['error']})" if row["error"] else ""
        print(f"{words:8} {row['milliseconds']:9.2f} ms  {name}{lock}{error}", flush=True)
        if options.output:
            with Path(options.output).open("a") as file:
                file.write(json.dumps({"benchmark": "waits", **row}) + "\n")
    # Communicators and the ticking thread would block an orderly exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
