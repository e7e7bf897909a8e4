"""The search over parallel sizes: bounds against simulations, the frontier against all combinations, its answers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.planning import planner, search
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod

H100 = find_hardware("h100")
MODEL = {
    "num_layers": 12,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 131072,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
}
SOME = {"tensor", "context", "expert", "micro-batch", "recompute"}


def found(arguments: dict, gpus: int, keep=(), limit: float = H100.memory, seconds: float = 600.0) -> search.Search:
    return search.search(search.variants(arguments, gpus, H100, keep), H100, limit, seconds=seconds)


def test_variants_use_all_gpus_and_keep_the_batch():
    tried = [each.job for each in search.variants(MODEL, 16, H100)]
    assert {job.gpus for job in tried} == {16}
    assert {job.microbatches * job.micro_batch * job.data for job in tried} == {16}
    assert {job.tensor for job in tried} == {1, 2, 4, 8}, "tensor ranks share a node"
    assert {job.pipeline for job in tried} == {1, 2, 4, 8}, "16 ranks are more than the layers"
    assert {job.sequence_parallel for job in tried if job.tensor > 1} == {True}
    assert {(job.micro_batch, job.recompute) for job in tried} == set(product((1, 2, 4, 8), ("none", "full")))


def test_kept_dimensions_stay_what_the_job_says():
    arguments = MODEL | {"tensor_model_parallel_size": 2, "recompute_granularity": "full"}
    tried = [each.job for each in search.variants(arguments, 16, H100, {"tensor", "recompute"})]
    assert {job.tensor for job in tried} == {2} and {job.recompute.value for job in tried} == {"full"}
    assert len({job.pipeline for job in tried}) > 1


def test_experts_are_spread_over_the_replicas():
    arguments = MODEL | {"num_experts": 8, "moe_router_topk": 2}
    tried = [each.job for each in search.variants(arguments, 16, H100)]
    assert {job.expert for job in tried} == {1, 2, 4, 8}
    assert all(job.data % job.expert == 0 for job in tried)


def test_long_sequences_are_cut_over_context_ranks():
    assert {each.job.context for each in search.variants(MODEL | {"seq_length": 16384}, 16, H100)} == {1, 2, 4}


@pytest.mark.parametrize(
    ("changed", "gpus", "said"),
    [
        ({"global_batch_size": None}, 16, "set --global-batch-size"),
        ({"global_batch_size": 7}, 128, "global_batch_size 7 is no multiple"),
        ({"num_layers": None}, 16, "num_layers is missing"),
    ],
)
def test_what_no_sizes_can_run_is_refused(changed, gpus, said):
    with pytest.raises(UserError, match=said):
        search.variants(MODEL | changed, gpus, H100)


def combinations(arguments: dict, gpus: int, keep=()):
    for each in search.variants(arguments, gpus, H100, keep):
        if each.job.pipeline == 1:
            yield each.job, planner.Candidate(planner.PLAIN, search.Plan())
            continue
        for candidate in planner.candidates(each.job, H100):
            if candidate.plan.vocab is not VocabMethod.INTERLACED:
                yield each.job, candidate


def test_no_simulation_is_faster_than_its_bound_and_memory_is_not_far_from_its_estimate():
    compared = 0
    for job, candidate in combinations(MODEL, 8, SOME - {"micro-batch"}):
        try:
            evaluation = planner.evaluate(candidate, job, H100)
        except UserError:
            continue
        least, _, memory = search.estimate(candidate.plan, job, H100)
        assert least <= evaluation.iteration_seconds * (1 + 1e-9), (job, candidate)
        assert 0.5 * evaluation.peak_memory <= memory <= search.MARGIN * evaluation.peak_memory, (job, candidate)
        compared += 1
    assert compared > 40


def test_the_search_finds_what_simulating_everything_finds():
    everything = []
    for job, candidate in combinations(MODEL, 8, SOME):
        try:
            everything.append(planner.evaluate(candidate, job, H100))
        except UserError:
            continue
    result = found(MODEL, 8, SOME)
    assert result.untried == 0 and result.dominated > 0
    fitting = [each for each in everything if each.fits(H100.memory)]
    fastest = min(each.iteration_seconds for each in fitting)
    assert result.fitting(H100.memory)[0].seconds == fastest
    frontier = result.frontier(H100.memory)
    assert [each.seconds for each in frontier] == sorted(each.seconds for each in frontier)
    assert [each.memory for each in frontier] == sorted((each.memory for each in frontier), reverse=True)
    # Of what was left out, nothing beats the frontier where it is much smaller than the fastest.
    for each in fitting:
        if each.iteration_seconds <= search.SLOWEST * fastest:
            assert any(
                one.seconds <= each.iteration_seconds * 1.001 and one.memory <= each.peak_memory * search.MARGIN
                for one in frontier
            ), each.candidate


def test_layers_that_the_ranks_cannot_share_equally_come_with_balanced_shards():
    arguments = MODEL | {"num_layers": 7, "pipeline_model_parallel_size": 4, "global_batch_size": 64}
    result = found(arguments, 4, SOME | {"pipeline"})
    (variant,) = result.variants
    fastest = result.fitting(H100.memory)[0]
    rows = fastest.evaluation.candidate.plan.vocab_rows
    assert rows is not None and sum(rows) == variant.job.model.vocab
    even = min(each.seconds for each in result.found if each.evaluation.candidate.plan.vocab_rows is None)
    assert fastest.seconds < 0.95 * even


def test_no_time_leaves_combinations_untried_and_says_what_they_could_take():
    result = found(MODEL, 8, SOME, seconds=0.0)
    assert result.untried > 0 and result.found
    assert result.untried_seconds < search.SLOWEST * result.found[0].seconds
    # Balanced shards that turn out to be even ones are not counted once they were simulated.
    assert result.count >= found(MODEL, 8, SOME).count


def test_nothing_fits():
    with pytest.raises(UserError, match=r"nothing fits 0.5 GiB on these GPUs: the least is about"):
        found(MODEL, 8, SOME, limit=2**29)


def command(tmp_path: Path, *words: str):
    flags = [part for name, value in MODEL.items() for part in _flag(name, value)]
    return CliRunner().invoke(app, ["plan", *flags, "--nodes", "1", *words])


def _flag(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def test_the_command_answers_in_all_formats(megatron_loaded, tmp_path):
    keep = [word for name in sorted(SOME) for word in ("--keep", name)]
    out = tmp_path / "found.json"
    done = command(tmp_path, "--search", *keep, "-o", str(out))
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document["gpus"] == 8 and document["untried"] == 0
    assert document["combinations"] == sum(document[name] for name in ("simulated", "too_large", "dominated"))
    best = document["best"]
    assert best["pipeline"] * best["data"] == 8 and best["fits"] and best["method"] != "interlaced"
    assert best["settings"]["pipeline_model_parallel_size"] == best["pipeline"]
    assert best["iteration_seconds"] <= 1.03 * document["frontier"][0]["iteration_seconds"]
    picture = tmp_path / "found.png"
    assert command(tmp_path, "--search", *keep, "-o", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = command(tmp_path, "--search", *keep)
    assert "The frontier: no other run is both faster and smaller." in done.output
    assert "use: --" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--search", "--keep", "schedule"], "--keep schedule names nothing that a search varies; use tensor, "),
        (["--keep", "tensor"], "--keep tensor has no effect without --search"),
        (["--search", "--write-schedule", "x.json"], "--write-schedule writes the schedule of one job"),
    ],
)
def test_wrong_questions_are_refused(tmp_path, words, said):
    done = command(tmp_path, *words)
    assert isinstance(done.exception, UserError) and str(done.exception).startswith(said)


def test_a_search_needs_the_cluster():
    done = CliRunner().invoke(app, ["plan", "configs/llama3_8b.yaml", "--search"])
    assert isinstance(done.exception, UserError) and "give --nodes" in str(done.exception)
