"""Measure the gain of assigned shards, with real processes and communication but sleeping passes.

    python benchmarks/sleeping_balance.py [--layers 7] [--ranks 4]

A sleeping rank needs no core, so eight ranks fit on two cores. Messages, collectives, the second stream and bookkeeping
are the runtime's own. The best iteration counts, because other work on the machine can only add time.

The model has a large vocabulary, and layers that the ranks cannot share equally. The lengths of passes are in
the proportions of a real training on two cores (`cpu_balance.py`). The output gives the times of the best layout with
whole vocabulary layers, of even shards and of balanced shards, relative to the bound: max(ceil(L / p), (L + v) / p)
layers for each microbatch, plus fill and drain of the pipeline, where v is the work of the vocabulary in layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from cpu_balance import train
from runtime_overhead import used_edges
from sleeping import SHAPES, SleepingModel, sleeping_layers
from sleeping_device import DEVICES

from megatron_vp.cost.planning.layer_division import divisions, fill
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.schedule import Placement, StageCosts, generate, lower, simulate

VOCABULARY = 16384


@dataclass(frozen=True)
class Run:
    """A run of one schedule with the seconds of its passes. `rows` are by rank, None without vocabulary passes."""

    name: str
    costs: StageCosts
    rows: tuple[int, ...] | None
    layers: tuple[int, ...] | None = None

    def schedule(self, microbatches: int):
        """The schedule as training orders it, for the costs of every rank."""
        ranks = len(self.costs.F)
        if self.rows is None:
            return generate("1f1b", ranks, microbatches, costs=self.costs)
        holders = [rank for rank, count in enumerate(self.rows) if count]
        return generate("1f1b", ranks, microbatches, vocab="vocab-2", costs=self.costs, vocab_ranks=holders)


def stage_costs(
    forward: Iterable[float], backward: Iterable[float], per_row: dict[str, list[float]], rows
) -> StageCosts:
    """The costs with F and B by rank, and with S, T, IF and IB in proportion to the rank's rows."""
    passes = {
        kind: tuple(each * count for each, count in zip(times, rows, strict=True)) for kind, times in per_row.items()
    }
    forward = tuple(forward)
    return StageCosts(forward, tuple(backward), (0.0,) * len(forward), **passes)


def measure(run: Run, options: argparse.Namespace) -> float:
    """Run in separate processes, and return the seconds of the best iteration."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as result:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        multiprocessing.spawn(_rank, (run, options, port, result), nprocs=len(run.costs.F))
        return json.loads((Path(result) / "seconds.json").read_text())


def _rank(rank: int, run: Run, options: argparse.Namespace, port: int, result: str) -> None:
    # As in `runtime_overhead`: threads that move messages do not preempt passes.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    ranks = len(run.costs.F)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    schedule = run.schedule(options.microbatches)
    members = None if run.rows is None else schedule.vocab_members
    groups = PipelineGroups.create([range(ranks)], used_edges(schedule), vocab_members=members)
    program = lower(schedule, run.costs)[rank]
    gc.disable()
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    device = DEVICES["asynchronous"]()
    times = []
    with device.serving():
        pipeline = Pipeline(groups)
        model = SleepingModel(schedule, rank, run.costs, device)
        layers = None
        if run.rows is not None:
            layers = sleeping_layers(schedule, rank, run.costs, device, sum(run.rows), run.rows)
        for _ in range(options.iterations + 1):
            dist.barrier()
            start = time.perf_counter()
            pipeline.run(schedule, program, model, layers, SHAPES, gradients=True)
            device.synchronise()
            dist.barrier()
            times.append(time.perf_counter() - start)
    if rank == 0:
        (Path(result) / "seconds.json").write_text(json.dumps(min(times[1:])))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Lengths:
    """The seconds of F and B of one layer, and of S, T, IF and IB of one row."""

    forward: float
    backward: float
    rows: dict[str, float]

    @property
    def layer(self) -> float:
        """The seconds of one layer's passes."""
        return self.forward + self.backward

    def costs(self, layers: tuple[int, ...], rows: tuple[int, ...]) -> StageCosts:
        """The costs with split vocabulary layers."""
        forward, backward = ([each * count for count in layers] for each in (self.forward, self.backward))
        return stage_costs(forward, backward, {kind: [each] * len(rows) for kind, each in self.rows.items()}, rows)

    def whole(self, layers: tuple[int, ...], vocabulary: int) -> StageCosts:
        """The costs with whole vocabulary layers. S and T of vocab-2 are the three products of the output layer, two of
        which belong to its backward.
        """
        forward, backward = ([each * count for count in layers] for each in (self.forward, self.backward))
        output = (self.rows["S"] + self.rows["T"]) * vocabulary
        forward[-1] += output / 3
        backward[-1] += output * 2 / 3
        forward[0] += self.rows["IF"] * vocabulary
        backward[0] += self.rows["IB"] * vocabulary
        return StageCosts(tuple(forward), tuple(backward), (0.0,) * len(layers))


def real_lengths(options: argparse.Namespace) -> Lengths:
    """Measure the lengths in a training with vocab-2 on two cores, each with two layers and half of the vocabulary."""
    reports = train(["--vocab-parallel", "--vocab-shards=even"], options.training_iterations)
    rows = 8192 // len(reports)

    def mean(kind: str) -> float:
        took = [fmean(each[kind] for each in report["pass_milliseconds_by_iteration"][1:]) for report in reports]
        return fmean(took) / 1000 / reports[0]["microbatches"]

    return Lengths(mean("F") / 2, mean("B") / 2, {kind: mean(kind) / rows for kind in ("S", "T", "IF", "IB")})


def balanced(lengths: Lengths, layers: int, ranks: int, vocabulary: int, microbatches: int) -> Run:
    """The fastest of the layouts and row counts that the planner considers for these lengths."""
    unit = 128
    units, row = vocabulary // unit, sum(lengths.rows.values())
    cost = [row * unit * count for count in range(units + 1)]
    found = []
    groups = divisions([lengths.layer] * layers, Placement.round_robin(ranks), cost)
    for counts, holders in chain.from_iterable(groups):
        work = [lengths.layer * count for count in counts]
        filled = fill(work, cost, [units if rank in holders else 0 for rank in range(ranks)])
        if filled is not None:
            rows = tuple(unit * count for count in filled)
            run = Run("balanced shards", lengths.costs(counts, rows), rows, counts)
            found.append((simulate(run.schedule(microbatches), run.costs).makespan, run))
    return min(found, key=lambda each: each[0])[1]


def best_whole(lengths: Lengths, layers: int, ranks: int, vocabulary: int, microbatches: int) -> Run:
    """The fastest of all layouts of whole layers, including those with a first or last stage without layers."""
    found = []
    for cuts in combinations(range(layers + ranks - 1), ranks - 1):
        ends = (-1, *cuts, layers + ranks - 1)
        counts = tuple(after - before - 1 for before, after in pairwise(ends))
        if all(counts[1:-1]):
            run = Run("best layout, whole vocabulary layers", lengths.whole(counts, vocabulary), None, counts)
            found.append((simulate(run.schedule(microbatches), run.costs).makespan, run))
    return min(found, key=lambda each: each[0])[1]


def uneven_layers(options: argparse.Namespace) -> list[dict]:
    """Compare even shards, balanced shards and the best layout of whole vocabulary layers with the bound."""
    layers, ranks, microbatches = options.layers, options.ranks, options.microbatches
    lengths = real_lengths(options)
    vocabulary = VOCABULARY
    scale = options.layer_ms / 1000 / lengths.layer
    lengths = Lengths(
        lengths.forward * scale, lengths.backward * scale, {kind: each * scale for kind, each in lengths.rows.items()}
    )
    work = sum(lengths.rows.values()) * vocabulary / lengths.layer
    spread = tuple(layers * (rank + 1) // ranks - layers * rank // ranks for rank in range(ranks))
    even = (vocabulary // ranks,) * ranks
    runs = [
        best_whole(lengths, layers, ranks, vocabulary, microbatches),
        Run("even shards", lengths.costs(spread, even), even, spread),
        balanced(lengths, layers, ranks, vocabulary, microbatches),
    ]
    steady = max(-(-layers // ranks), (layers + work) / ranks)
    bound = lengths.layer * (microbatches * steady + layers * (ranks - 1) / ranks)
    setting = {"case": "layers", "ranks": ranks, "model_layers": layers, "microbatches": microbatches}
    rows = []
    for run in runs:
        took = measure(run, options)
        rows.append(
            setting
            | {
                "run": run.name,
                "layers": run.layers,
                "rows": run.rows,
                "vocabulary_in_layers": round(work, 3),
                "seconds": round(took, 4),
                "over_bound": round(took / bound, 4),
                "simulated_over_bound": round(simulate(run.schedule(microbatches), run.costs).makespan / bound, 4),
            }
        )
    return rows


def main() -> None:
    """Run a case, and print or append to a file one line of JSON per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=48)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--layers", type=int, default=7, help="number of layers of the model")
    parser.add_argument("--layer-ms", type=float, default=40.0, help="F and B of a layer are stretched to this")
    parser.add_argument("--training-iterations", type=int, default=4, help="training iterations to measure")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    machine = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    for row in uneven_layers(options):
        print(json.dumps(row), flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(row | machine) + "\n")


if __name__ == "__main__":
    main()
