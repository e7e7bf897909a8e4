"""Compare balanced vocabulary shards with even shards and with moved layers, by the cost model's predictions.

    python benchmarks/balance.py [--models gpt_4b,...] [--ranks 4,6,...] [--schedules 1f1b,...] [--output FILE.jsonl]

Every job trains a model of configs/ on H100 GPUs, with 128 microbatches. It has pipeline parallelism only and no memory
limit. Each line shows one job under one schedule, with the better of vocab-1 and vocab-2:

    whole       the fastest run with whole vocabulary layers and with layers spread evenly or moved to balance stages
    even        vocabulary parallelism with even shards
    balanced    with the layers and rows that `megatron_vp.cost.planning.balanced` chooses
    over bound  the time of `balanced`, divided by that of max(ceil(L / p), (L + v) / p) layers per microbatch plus fill
                and drain, if all GPUs are equally fast; v is the time that one rank would take for the whole
                vocabulary, in layers. Only for `1f1b`

The last lines compare the best schedules, and give means. All numbers are predictions; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from least_passes import least_passes

from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.balanced import balanced
from megatron_vp.cost.planning.candidates import balanced_layers
from megatron_vp.cost.planning.layer_division import divided, layer_seconds
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_sizes
from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES, VocabMethod, family

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MODELS = ("gemma2_9b", "qwen3_8b", "llama3_8b", "gpt_4b", "gpt_10b", "gpt_21b")
PLANNED = [name for name, record in FAMILIES.items() if record.planned]
H100 = find_hardware("h100")
ALIKE = H100.alike
METHODS = (VocabMethod.VOCAB_2, VocabMethod.VOCAB_1)


def job_on(model: str, ranks: int) -> Job:
    """The job that trains a configuration's model on `ranks` pipeline ranks."""
    values = dict(read_sizes([CONFIGS / f"{model}.yaml"], []))
    values |= {"pipeline_model_parallel_size": ranks, "tensor_model_parallel_size": 1, "global_batch_size": None}
    return replace(job_of(values), microbatches=128)


def line(model: str, ranks: int, schedule: str) -> dict | None:
    """Predict one job under one schedule; None if it cannot run."""
    job, record = job_on(model, ranks), family(schedule)
    chunks = 2 if record.chunks is None else None
    placement = record.placement_of(ranks, chunks)
    if job.model.layers < placement.stages:
        return None
    even_layers, whole = divided(layer_seconds(PassTimes(job, H100)), placement), []
    for layers in {balanced_layers(job, placement, H100), even_layers}:
        try:
            found = evaluate(Plan(schedule, chunks=chunks, layers=layers), job, H100)
        except UserError:  # for example, a V shape with tied embeddings
            continue
        whole.append((found.iteration_seconds, found.plan.layers))
    runs = []
    for method in METHODS:
        plan = Plan(schedule, method, chunks)
        assigned, _ = balanced(job, plan, H100)
        even = replace(plan, layers=even_layers)
        seconds = [evaluate(each, job, H100).iteration_seconds for each in (assigned, even)]
        runs.append((*seconds, method, assigned))
    seconds, even, method, assigned = min(runs, key=lambda run: run[0])
    found = {
        "model": model,
        "pipeline": ranks,
        "schedule": schedule,
        "method": method,
        "whole_seconds": min(whole)[0] if whole else None,
        "whole_layers": min(whole)[1] if whole else None,
        "even_seconds": min(even for _, even, *_ in runs),
        "balanced_seconds": seconds,
        "layers": assigned.layers,
        "vocab_rows": assigned.vocab_rows,
    }
    if schedule == DEFAULT_SCHEDULE:
        alike = evaluate(assigned, job, ALIKE)
        passes = alike.iteration_seconds - alike.step
        found["over_bound"] = passes / least_passes(job, method, ALIKE)
    return found


def summary(lines: list[dict]) -> str:
    """Format all lines as a table, with means over the jobs."""
    table = ["| model | p | schedule | whole s | even / whole | balanced / whole | over bound | layers | rows |"]
    table.append("|---|---|---|---|---|---|---|---|---|")
    for each in lines:
        whole = each["whole_seconds"]
        ratios = [f"{each[name] / whole:.3f}" if whole else "-" for name in ("even_seconds", "balanced_seconds")]
        over = f"{each['over_bound']:.3f}" if "over_bound" in each else ""
        cut = [" ".join(map(str, each[name])) if each[name] else "even" for name in ("layers", "vocab_rows")]
        cells = [each["model"], str(each["pipeline"]), f"{each['schedule']}, {each['method']}"]
        cells += [f"{whole:.3f}" if whole else "-", *ratios, over, *cut]
        table.append(f"| {' | '.join(cells)} |")
    jobs = {(each["model"], each["pipeline"]) for each in lines}
    for title, chosen in ((DEFAULT_SCHEDULE, [DEFAULT_SCHEDULE]), ("the best of all schedules", PLANNED)):
        found = []
        for job in jobs:
            own = [each for each in lines if (each["model"], each["pipeline"]) == job and each["schedule"] in chosen]
            whole = min((each["whole_seconds"] for each in own if each["whole_seconds"]), default=None)
            if whole:
                found.append([min(each[name] for each in own) / whole for name in ("even_seconds", "balanced_seconds")])
        for name, ratios in zip(("even", "balanced"), zip(*found, strict=True), strict=True):
            table.append(
                f"{title}, {name} over whole: mean {fmean(ratios):.3f}, worst {max(ratios):.3f}, best "
                f"{min(ratios):.3f}, at most 1 in {sum(ratio <= 1 for ratio in ratios)} of {len(ratios)} jobs"
            )
    over = [each["over_bound"] for each in lines if "over_bound" in each]
    if over:
        table.append(f"over bound: mean {fmean(over):.3f}, worst {max(over):.3f}")
    return "\n".join(table)


def main() -> None:
    """Predict all lines, print the table and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="4,6,8,12,16")
    parser.add_argument("--schedules", default=",".join(n for n in PLANNED if FAMILIES[n].own_method is None))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    schedules = args.schedules.split(",")
    wanted = [
        (model, int(ranks), schedule)
        for model in args.models.split(",")
        for ranks in args.ranks.split(",")
        for schedule in schedules
    ]
    found = {}
    with worker_pool(args.processes) as pool:
        running = {pool.submit(line, *each): each for each in wanted}
        for done, future in enumerate(as_completed(running), 1):
            found[running[future]] = future.result()
            print(f"\r{done} of {len(wanted)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    lines = [found[each] for each in wanted if found[each]]
    print(summary(lines))
    if args.output:
        args.output.write_text("".join(json.dumps({"benchmark": "balance"} | each) + "\n" for each in lines))


if __name__ == "__main__":
    main()
