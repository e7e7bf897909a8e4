"""Test the search over parallel sizes: bounds against simulations, the frontier against all combinations, and its
output.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.planning import search
from megatron_vp.cost.planning.bounds import SLOWEST, time_and_memory
from megatron_vp.cost.planning.predict import Prediction
from megatron_vp.cost.planning.variants import variants
from megatron_vp.errors import UserError

H100 = find_hardware("h100")
MODEL = {
    "num_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 131072,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
}
SOME = {"tensor", "context", "expert", "micro-batch", "recompute"}


def found(arguments: dict, gpus: int, keep=(), limit: float = H100.memory, **settings) -> search.Search:
    return search.Search(variants(arguments, gpus, H100, keep), H100, limit, **settings).run()


def test_variants_use_all_gpus_and_keep_the_batch():
    tried = [each.job for each in variants(MODEL | {"num_layers": 12, "global_batch_size": 16}, 16, H100)]
    assert {job.gpus for job in tried} == {16}
    assert {job.microbatches * job.micro_batch * job.data for job in tried} == {16}
    assert {job.tensor for job in tried} == {1, 2, 4, 8}, "tensor ranks share a node"
    assert {job.pipeline for job in tried} == {1, 2, 4, 8}, "16 ranks are more than the layers"
    assert {job.sequence_parallel for job in tried if job.tensor > 1} == {True}
    assert {(job.micro_batch, job.recompute) for job in tried} == set(product((1, 2, 4, 8), ("none", "full")))


@pytest.mark.parametrize(
    ("changed", "gpus", "said"),
    [
        ({"global_batch_size": None}, 16, "set --global-batch-size"),
        ({"global_batch_size": 7}, 128, "global-batch-size 7 is not a multiple"),
        ({"num_layers": None}, 16, "num_layers is missing"),
        ({"tensor_model_parallel_size": 3}, 16, "sizes fixed by --keep tensor does not divide the number of GPUs"),
    ],
)
def test_what_no_sizes_can_run_is_refused(changed, gpus, said):
    with pytest.raises(UserError, match=said):
        variants(MODEL | changed, gpus, H100, ["tensor"] if "tensor_model_parallel_size" in changed else [])


def everything(arguments: dict, gpus: int, keep=(), limit: float = H100.memory):
    """All that a search enumerates, simulated: each option with its evaluations."""
    for index, each in enumerate(variants(arguments, gpus, H100, keep)):
        away = replace(each, settings=each.settings or {"own": False})
        for option in search.bounded_options(index, away, H100, 2, False):
            made = search.evaluations(option.plan, each.job, H100, limit)
            for evaluation in () if isinstance(made, str) else made:
                yield each.job, option, evaluation


def frontier(points, limit: float) -> list[tuple[float, float]]:
    """Of seconds and bytes, written down once more: no other is as fast and smaller, or faster and as small."""
    fitting = sorted({point for point in points if point[1] <= limit})
    fitting = [point for point in fitting if point[0] <= SLOWEST * fitting[0][0]]
    return [one for one in fitting if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in fitting)]


def fastest(runs: list[Prediction]) -> float:
    return min(each.iteration_seconds for each in runs if each.plan.in_megatron)


def assert_finds_all(arguments: dict, gpus: int, limit: float, keep=()) -> None:
    simulated = list(everything(arguments, gpus, keep, limit))
    for job, option, evaluation in simulated:
        seconds, memory = evaluation.iteration_seconds, evaluation.peak_memory
        assert option.bound.seconds <= seconds * (1 + 1e-9), (job, option.plan)
        assert option.bound.memory_within(seconds) <= memory * (1 + 1e-9), (job, option.plan)
    result = found(arguments, gpus, keep, limit, budget=10**6)
    expected = frontier([(each.iteration_seconds, each.peak_memory) for _, _, each in simulated], limit)
    simulated_ones = replace(result, found=[each for each in result.found if not each.plan.shape])
    assert [time_and_memory(each) for each in simulated_ones.frontier] == expected
    assert not result.untried
    assert fastest(simulated_ones.fitting) == fastest([each for _, _, each in simulated if each.fits(limit)])
    return result, simulated


def test_the_search_finds_what_simulating_everything_finds():
    result, simulated = assert_finds_all(MODEL, 8, H100.memory, SOME)
    assert len(result.found) < 0.6 * len(simulated), "bounds save simulations"


def test_the_search_finds_everything_near_the_edge_of_memory():
    arguments = MODEL | {"num_layers": 6, "num_experts": 4, "moe_router_topk": 2, "vocab_size": 50257}
    assert_finds_all(arguments, 4, 10 * 2**30, {"context", "micro-batch", "tensor"})


def test_a_search_is_never_slower_than_a_plan_of_the_jobs_own_sizes():
    arguments = MODEL | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    (own,) = [each for each in variants(arguments, 8, H100) if not each.settings]
    assert own.job == job_of(arguments, 8)
    planned = search.Search([own], H100, H100.memory).run()
    searched = found(arguments, 8, budget=1)
    assert searched.fitting[0].iteration_seconds <= planned.fitting[0].iteration_seconds


def test_a_spent_budget_leaves_combinations_and_says_which_they_may_be(monkeypatch):
    monkeypatch.setattr(search, "COMPARED", 0)
    whole = found(MODEL, 8, SOME)
    result = found(MODEL, 8, SOME, budget=3)
    assert not whole.untried and result.untried and result.count == whole.count
    assert 1 <= len({(each.job, each.plan) for each in result.found if each.settings}) <= 3
    missing = {*map(time_and_memory, whole.frontier)} - {*map(time_and_memory, result.found)}
    least = min(option.bound.seconds for option in result.untried)
    assert missing and min(seconds for seconds, _ in missing) >= least * (1 - 1e-9)


def test_the_answer_does_not_depend_on_the_cores_or_on_an_earlier_search(monkeypatch):
    first = found(MODEL, 8, SOME, budget=10)
    bits, limit = pickle.dumps(first.found), 0.9 * first.fitting[0].peak_memory
    alone, again = (found(MODEL, 8, SOME, limit, budget=10, earlier=each) for each in (None, first))
    assert list(map(time_and_memory, again.found)) == list(map(time_and_memory, alone.found))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    assert bits == pickle.dumps(found(MODEL, 8, SOME, budget=10).found)


def test_nothing_fits():
    with pytest.raises(UserError, match=r"no plan fits into 0.5 GiB per rank: the smallest, .*, needs [\d.]+ GiB; use"):
        _ = found(MODEL, 8, SOME, limit=2**29).verdict


def command(tmp_path: Path, *words: str):
    flags = [part for name, value in MODEL.items() for part in _flag(name, value)]
    return CliRunner().invoke(app, ["plan", *flags, "--nodes", "1", *words])


def _flag(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def test_the_command_answers_in_all_formats(tmp_path, search_once):
    keep = [word for name in sorted(SOME) for word in ("--keep", name)]
    out = tmp_path / "found.json"
    done = command(tmp_path, "--search", *keep, "-o", str(out))
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document["gpus"] == 8 and document["untried"] == 0
    assert 0 < document["simulated"] < document["combinations"]
    best = document["best"]
    assert best["pipeline"] * best["data"] == 8 and best["fits"] and best["method"] != "interlaced"
    assert best["settings"]["pipeline_model_parallel_size"] == best["pipeline"]
    assert best["iteration_seconds"] <= 1.01 * document["frontier"][0]["iteration_seconds"]
    verdict, own = document["verdict"], document["verdict"]["rival"]
    assert verdict["answer"] == "faster" and verdict["ours"] == best
    assert own["method"] in ("plain", "redistributed") and own["schedule"] in ("1f1b", "interleaved")
    lines = command(tmp_path, "--search", *keep).output.splitlines()
    assert (
        lines[0].startswith(f"faster: {verdict['speedup']:.2f} times as fast") and f"({own['schedule']}, " in lines[0]
    )
    assert lines[1].startswith("use: --")
    assert any(
        "the table has the frontier: runs that no other run beats in both time and memory" in one for one in lines
    )


def test_a_partial_answer_says_so_in_all_formats(tmp_path, search_once):
    words = ["--search", "--search-budget", "2", *(word for name in sorted(SOME) for word in ("--keep", name))]
    table = command(tmp_path, *words).stdout
    (heading,) = [line for line in table.splitlines() if line.startswith("The frontier is partial: ")]
    assert "because --search-budget 2 was used up" in heading
    document = json.loads(command(tmp_path, *words, "--format", "json").stdout)
    assert document["untried"] and f" {document['untried']:,} ways to train, which take at least" in heading


def test_what_must_be_unset_is_in_the_json(tmp_path):
    own = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    own += ["--search", "--keep", "tensor", "--keep", "context", "--keep", "pipeline", "--keep", "micro-batch"]
    document = json.loads(command(tmp_path, *own, "--pipeline-model-parallel-size", "2", "--format", "json").stdout)
    for entry in [document["best"], *document["frontier"]]:
        unset = {name for name, value in entry["settings"].items() if value in (None, False)}
        assert {option[2:].replace("-", "_") for option in entry["unset"]} == unset
        overlay = yaml.safe_load(entry["overlay"]) or {"parallelism": {}}
        assert overlay["parallelism"] == entry["settings"]
    assert any("--recompute-granularity" in entry["unset"] for entry in document["frontier"])
    assert any(not entry["unset"] for entry in document["frontier"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--search", "--keep", "schedule"], "--keep schedule is not a setting that --search varies; use tensor, "),
        (["--keep", "tensor"], "--keep tensor has no effect without --search"),
        (["--search-budget", "5"], "--search-budget 5 has no effect: add --search or --offload"),
    ],
)
def test_wrong_questions_are_refused(tmp_path, words, said):
    done = command(tmp_path, *words)
    assert isinstance(done.exception, UserError) and str(done.exception).startswith(said)


def test_a_search_needs_the_cluster():
    done = CliRunner().invoke(app, ["plan", "configs/llama3_8b.yaml", "--search"])
    assert isinstance(done.exception, UserError) and "give the number of nodes with --nodes" in str(done.exception)
