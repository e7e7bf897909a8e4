"""Measure what the runtime adds to a schedule, with real processes and communication but sleeping passes.

    python benchmarks/runtime_overhead.py [--ranks 8] [--microbatches 32] [--pass-ms 20] [--schedule 1f1b ...]
                                          [--device asynchronous | host] [--offload-chunks 1] [--copy-ms 15]

A sleeping rank needs no core, so eight ranks fit on two cores. Every F, B and W of a chunk lasts `--pass-ms`, and
vocabulary passes last in proportion. Messages, collectives, the second stream and bookkeeping are the runtime's own.
The passes run on a device that the host runs ahead of, as on a GPU. With `--device host` they block the host, and the
runtime's bookkeeping adds to them, as on a CPU. With `--offload-chunks`, the activations of that many chunks of each
rank are offloaded and fetched back, and every copy of a chunk lasts `--copy-ms`.

The output is the measured time of an iteration relative to the timeline's prediction. The prediction uses the lengths
of passes and the latency of every kind of message and collective, which is measured beforehand in the same processes,
separately and without the device. Values above 1 come from bookkeeping, late wake-ups, and communication that
interferes with other communication. Values below 1 arise because some communication completes sooner than when it is
measured separately, as ranks do not all reach it at the same time. `free_s` is the prediction with free communication,
and `cpu_ms` is the processor time per rank and microbatch; the sum over all ranks must be small compared with the
duration of a microbatch times the number of cores. The best iteration counts, because other work on the machine can
only add time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from sleeping import SHAPES, SleepingModel, sleeping_layers
from sleeping_device import DEVICES, SleepingDevice

from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.links import Links
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.runtime.streams import ThreadStream
from megatron_vp.schedule import (
    Channel,
    CollectiveKind,
    Message,
    PassCosts,
    Post,
    Schedule,
    StageCosts,
    VocabMethod,
    generate,
    lower,
    simulate,
)
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.transfers import Copy, Edge

UNITS = {"F": 1.0, "B": 1.0, "W": 1.0, "S": 0.25, "T": 0.25, "IF": 0.05, "IB": 0.05}
METHODS = {"1f1b": "vocab-2", "v-half": "vocab-2", "interlaced": "interlaced", "po": "vocab-2"}
DEFAULTS = ("1f1b", "v-half", "interlaced")
ROUNDS = 20
"""The number of measurements of each latency."""


def latency(operation: Callable[[], None]) -> float:
    """The median number of seconds from when the last rank is ready to when the last rank has finished."""
    took = []
    for _ in range(ROUNDS):
        dist.barrier()
        time.sleep(0.02)
        start = time.perf_counter()
        operation()
        marks: list = [None] * dist.get_world_size()
        dist.all_gather_object(marks, (start, time.perf_counter()))  # all ranks are on one host, with one clock
        starts, ends = zip(*marks, strict=True)
        took.append(max(ends) - max(starts))
    return statistics.median(took)


def measured_latencies(groups: PipelineGroups) -> tuple[float, dict[CollectiveKind, float]]:
    """Measure the latency of a message between neighbours, and of every kind of collective, on otherwise idle ranks."""
    ranks, rank = len(groups.members), groups.rank
    stream, communicator = ThreadStream(), groups.vocabulary
    rows, statistics_3n = SHAPES.rows(SHAPES.tokens), torch.zeros(3, SHAPES.tokens)
    gathered, number_n = torch.zeros(ranks, 3, SHAPES.tokens), torch.zeros(SHAPES.tokens)
    counts = [SHAPES.tokens // ranks] * ranks
    at_root, held = (rows, counts) if rank == 0 else (rows[:0], [0] * ranks)
    own, only = rows[: counts[rank]].clone(), [counts[rank], *[0] * (ranks - 1)]

    def tokens() -> None:
        communicator.broadcast(SHAPES.token_ids(), 0)
        communicator.broadcast(SHAPES.token_ids(), ranks - 1)

    def c1() -> None:
        communicator.all_gather(gathered, statistics_3n)
        communicator.reduce(rows, 0)

    operations = {
        CollectiveKind.TOKENS: tokens,
        CollectiveKind.EMBED: lambda: communicator.exchange(at_root, own, held, only),
        CollectiveKind.C0: lambda: communicator.broadcast(rows, 0),
        CollectiveKind.C1: c1,
        CollectiveKind.C2: lambda: communicator.reduce(rows, 0),
        CollectiveKind.LOSS_GRAD: lambda: communicator.broadcast(number_n, ranks - 1),
        CollectiveKind.EMBED_GRAD: lambda: communicator.exchange(own, at_root, only, held),
    }

    def message() -> None:
        store, forward = Store(), Message(Channel.ACTIVATION, 0, 0, 1, 0, 1)
        links = Links(SimpleNamespace(groups=groups, store=store, shapes=SHAPES))
        if rank == 0:
            store.put(Slot.ACTIVATION, 0, SHAPES.activation(), at=1)
        receive = links.post(forward) if rank < 2 else None
        if receive is not None:
            receive()
        links.finish()

    found = {kind: latency(lambda operation=each: stream.submit(operation).wait()) for kind, each in operations.items()}
    return latency(message), found


def known_costs(schedule: Schedule, costs: PassCosts, message: float, collectives: dict) -> StageCosts:
    """The costs for the simulator: the lengths of passes, and the measured latencies."""
    ranks, stages = schedule.pipeline_size, schedule.placement.stages
    chunk = [(getattr(costs, kind) / schedule.chunks,) * stages for kind in ("F", "B", "W")]
    vocabulary = [(getattr(costs, kind),) * ranks for kind in ("S", "T", "IF", "IB")]
    pairs = [(a, b, channel) for a in range(ranks) for b in range(ranks) for channel in Channel]
    copy = costs.other["copy"] / schedule.chunks
    copies = {(out, *where): copy for out in (True, False) for where in schedule.offloaded}
    messages = dict.fromkeys(pairs, message)
    return StageCosts(*chunk, *vocabulary, messages=messages, collectives=collectives, copies=copies)


def made_schedule(name: str, options: argparse.Namespace, communication: float) -> tuple[Schedule, PassCosts]:
    """Generate a schedule for passes of the requested lengths; return it and the costs in seconds."""
    chunks = 2 if name in ("v-half", "po") else 1
    unit = options.pass_ms / 1000 * chunks
    lengths = {kind: value * unit for kind, value in UNITS.items()}
    costs = PassCosts(**lengths, comm=communication, other={"copy": options.copy_ms / 1000 * chunks})
    method, offloaded = VocabMethod(METHODS[name]), min(options.offload_chunks, chunks)
    asked = {"vocab": method, "costs": costs, "offload_chunks": offloaded}
    return expand_interlaced(generate(name, options.ranks, options.microbatches, **asked)), costs


class SleepingCopies:
    """Makes copies take time in the thread that runs them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @contextmanager
    def __call__(self, operation: object) -> Iterator[None]:
        """Sleep during a copy."""
        if isinstance(operation, Copy):
            time.sleep(self._seconds)
        yield


def used_edges(schedule: Schedule) -> set[Edge]:
    """The edges that a schedule uses. Others are left out, because gloo wakes the thread of each communicator 100 times
    a second.
    """
    posted = (step.operation for program in lower(schedule) for step in program.instructions if isinstance(step, Post))
    return {(each.source, each.target, each.channel) for each in posted if isinstance(each, Message)}


def run_schedule(
    name: str,
    options: argparse.Namespace,
    pipeline: Pipeline,
    device: SleepingDevice,
    message: float,
    collectives: dict[CollectiveKind, float],
) -> dict:
    """Run one schedule and return a row of results; `cpu_ms` is the processor time of all threads per rank and
    microbatch.
    """
    ranks, rank = len(pipeline.groups.members), pipeline.groups.rank
    schedule, costs = made_schedule(name, options, statistics.fmean([message, *collectives.values()]))
    known = known_costs(schedule, costs, message, collectives)
    program = lower(schedule, known)[rank]
    model = SleepingModel(schedule, rank, costs, device)
    layers = sleeping_layers(schedule, rank, costs, device)
    copies = SleepingCopies(options.copy_ms / 1000)
    times, cpu = [], []
    for _ in range(options.iterations + 1):
        dist.barrier()
        burnt = time.process_time()
        start = time.perf_counter()
        pipeline.run(schedule, program, model, layers, SHAPES, gradients=True, observer=copies)
        device.synchronise()
        cpu.append(time.process_time() - burnt)
        dist.barrier()
        times.append(time.perf_counter() - start)
    free = known_costs(schedule, costs, 0.0, {})
    # The first iteration connects communicators.
    best, middle = min(times[1:]), statistics.median(times[1:])
    burnt = torch.tensor(min(cpu[1:]) / options.microbatches / ranks)
    dist.all_reduce(burnt)
    predicted, at_least = simulate(schedule, known).makespan, simulate(schedule, free).makespan
    assert best > at_least, f"an iteration of {best:.4f} s, when passes and their order alone take {at_least:.4f}"
    return {
        "schedule": name,
        "device": options.device,
        "offloaded": len(schedule.offloaded),
        "ratio": round(best / predicted, 4),
        "median_ratio": round(middle / predicted, 4),
        "predicted_s": round(predicted, 4),
        "free_s": round(at_least, 4),
        "measured_s": [round(each, 4) for each in times[1:]],
        "cpu_ms": round(1e3 * burnt.item(), 3),
    }


def _rank(rank: int, name: str, options: argparse.Namespace, port: int) -> None:
    # If every rank had its own core, threads that move messages would never delay the start of a pass. Threads inherit
    # the scheduling policy that is set when they start: those of gloo and of the second stream do not preempt others,
    # but this one does. Automatic garbage collection is off, as with Megatron's `--manual-gc`.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    ranks = options.ranks
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    groups = PipelineGroups.create([range(ranks)], used_edges(made_schedule(name, options, 0.0)[0]))
    message, collectives = measured_latencies(groups)
    gc.disable()
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    device = DEVICES[options.device]()
    with device.serving():
        row = run_schedule(name, options, Pipeline(groups), device, message, collectives)
    if rank == 0:
        row["message_ms"] = round(1e3 * message, 3)
        row["collective_ms"] = {kind.value: round(1e3 * each, 3) for kind, each in collectives.items()}
        print(json.dumps(row), flush=True)
        if options.output:
            settings = {
                name: getattr(options, name)
                for name in ("ranks", "microbatches", "pass_ms", "offload_chunks", "copy_ms")
            }
            machine = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
            with Path(options.output).open("a") as file:
                file.write(json.dumps(row | settings | machine) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Run every schedule in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--pass-ms", type=float, default=20.0, help="how long F, B and W of a chunk last")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--offload-chunks", type=int, default=0, help="number of chunks per rank to offload")
    parser.add_argument("--copy-ms", type=float, default=15.0, help="how long a copy of a chunk lasts")
    parser.add_argument("--device", default="asynchronous", choices=list(DEVICES), help="what the passes run on")
    parser.add_argument("--schedule", nargs="+", default=list(DEFAULTS), choices=list(METHODS))
    parser.add_argument("--output", help="append a line of JSON per schedule to this file")
    options = parser.parse_args()
    for name in options.schedule:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        multiprocessing.spawn(_rank, (name, options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
