"""Measure what `--log-pipeline-interval 1` adds to a step, with real processes and communication but sleeping passes.

    python benchmarks/log_interval.py [--ranks 4] [--microbatches 16] [--pass-ms 10] [--iterations 20]

Recorded and unrecorded iterations take turns in the same processes, so that both see the same machine. After a recorded
iteration, every rank reads its timings and puts its figures into the store, as in training, before the step counts as
done; the last rank also fetches the figures of all ranks. The output is the ratio of the medians, the ratio of the
fastest iterations, and the processor time of the last rank per iteration of either kind, which other work on the
machine affects least.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from runtime_overhead import METHODS, made_schedule, used_edges
from sleeping import SHAPES, SleepingModel, sleeping_layers
from sleeping_device import DEVICES

from megatron_vp.mcore.reports import pipeline_scalars
from megatron_vp.mcore.reports.pipeline_scalars import PipelineScalars
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule import lower


def run(name: str, options: argparse.Namespace, groups: PipelineGroups) -> dict | None:
    """Run one schedule; return a row of results on the last rank, None on others."""
    device, pipeline, ranks, rank = DEVICES["host"](), Pipeline(groups), options.ranks, groups.rank
    schedule, costs = made_schedule(name, options, 0.0)
    program, model = lower(schedule, costs)[rank], SleepingModel(schedule, rank, costs, device)
    layers = sleeping_layers(schedule, rank, costs, device)
    logged: list[dict[str, float]] = []
    took: dict[bool, list[float]] = {False: [], True: []}
    burnt: dict[bool, list[float]] = {False: [], True: []}
    own_rank = mock.patch.object(pipeline_scalars.parallel_state, "get_pipeline_model_parallel_rank", lambda: rank)
    logs = mock.patch.object(pipeline_scalars, "_log", lambda values, _: logged.append(values))
    with device.serving(), own_rank, logs:
        for iteration in range(2 * options.iterations + 2):
            recorded = bool(iteration % 2)
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            recorder = Recorder(SHAPES.device) if recorded else None
            pipeline.run(schedule, program, model, layers, SHAPES, gradients=True, observer=recorder.span)
            if recorder:
                recorder.finish()
                PipelineScalars(argparse.Namespace(curr_iteration=iteration - 1)).add(recorder)
                if rank == ranks - 1:
                    pipeline_scalars._write(iteration, ranks)
            burnt[recorded].append(time.process_time() - before)
            dist.barrier()
            took[recorded].append(time.perf_counter() - start)
    if rank != ranks - 1:
        return None
    assert len(logged) == options.iterations + 1, f"{len(logged)} iterations were written"
    plain, watched = took[False][1:], took[True][1:]  # the first iterations connect communicators
    return {
        "schedule": name,
        "median_ratio": round(statistics.median(watched) / statistics.median(plain), 4),
        "ratio": round(min(watched) / min(plain), 4),
        "median_s": [round(statistics.median(each), 4) for each in (plain, watched)],
        "cpu_ms": [round(1e3 * statistics.median(burnt[each][1:]), 1) for each in (False, True)],
        "curves": {key: round(value, 3) for key, value in logged[-1].items()},
    }


def _rank(rank: int, name: str, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    gc.disable()
    edges = used_edges(made_schedule(name, options, 0.0)[0])
    row = run(name, options, PipelineGroups.create([range(options.ranks)], edges))
    if row:
        settings = {key: getattr(options, key) for key in ("ranks", "microbatches", "pass_ms", "iterations")}
        print(json.dumps(row | settings | {"cores": os.cpu_count()}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run every schedule in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--pass-ms", type=float, default=10.0, help="how long F, B and W of a chunk last")
    parser.add_argument("--iterations", type=int, default=20, help="of each kind")
    parser.add_argument("--schedule", nargs="+", default=["1f1b", "v-half"], choices=list(METHODS))
    options = parser.parse_args()
    options.offload_chunks = options.copy_ms = 0  # of `made_schedule`: no activations leave
    for name in options.schedule:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        multiprocessing.spawn(_rank, (name, options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
