"""Test hybrid models: letters add up to the layers of a GPT model, and finer cuts are never worse than whole layers."""

import json
import shlex
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.job_plan import plan_of, settings_of, uncounted
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.layer_operations import (
    LAYERS,
    Matrix,
    Op,
    layer_flops,
    layer_weights,
)
from megatron_vp.cost.layers.shapes import Fp8Recipe, Job, ModelShape, Plan
from megatron_vp.cost.planning.layer_division import divided
from megatron_vp.cost.planning.predict import predict
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import flags_of, read_sizes, yaml_of
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.jobs.pattern_text import Pattern
from megatron_vp.jobs.yaml_files import read_leaves
from megatron_vp.mcore.start.preflight import check_job
from megatron_vp.schedule import Placement, VocabMethod

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from least_passes import loads_of

H100 = find_hardware("h100")
MODEL = ModelShape(layers=8, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=16, pipeline=4, layers=LayerKind.ENGINE)
EXPERTS = replace(MODEL, experts=8, experts_per_token=2, gated=True)


def hybrid(job: Job) -> Job:
    """The same model as a pattern: two letters for each layer."""
    unit = "*E" if job.model.experts else "*-"
    model = replace(job.model, layers=2 * job.model.layers, pattern=unit * job.model.layers)
    return replace(job, model=model, bf16_at_start=2 * job.bf16_at_start, bf16_at_end=2 * job.bf16_at_end)


@pytest.mark.parametrize("plan", [Plan(), Plan(vocab=VocabMethod.VOCAB_2), Plan("v-half", VocabMethod.VOCAB_1)])
@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, layers=LayerKind.LOCAL, attention_dropout=True, tensor=2, sequence_parallel=True),
        replace(JOB, model=EXPERTS, data=4, expert=4, distributed_optimizer=True, glu_intermediates=2),
        replace(JOB, fp8=Fp8Recipe.TENSORWISE, bf16_at_start=1, bf16_at_end=1),
        replace(JOB, model=replace(MODEL, query_key_norms=True, rotary=True), layers=LayerKind.LOCAL_SDPA),
    ],
)
def test_an_even_cut_costs_what_whole_layers_cost(job, plan):
    whole, letters = predict(job, plan, H100), predict(hybrid(job), plan, H100)
    assert letters.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=1e-9)
    assert letters.mfu == pytest.approx(whole.mfu, rel=1e-9)
    for ours, theirs in zip(letters.memory, whole.memory, strict=True):
        assert ours.parts() == pytest.approx(theirs.parts(), rel=1e-9)


@pytest.mark.parametrize("model", [MODEL, EXPERTS])
def test_letters_share_a_layers_work_and_weights(model):
    job = replace(JOB, model=model)
    parts = ("*", "E" if model.experts else "-")
    for figure in (layer_flops, layer_weights):
        assert sum(figure(job, kind) for kind in parts) == figure(job)


@settings(max_examples=80, deadline=None)
@given(
    extra=st.lists(st.sampled_from([0.0, 0.5, 2.5]), min_size=2, max_size=4),
    work=st.lists(st.sampled_from([0.3, 1.0, 1.7]), min_size=4, max_size=11),
)
def test_no_other_cut_has_a_lower_maximum(extra, work):
    ranks = len(extra)
    placement = Placement.round_robin(ranks)
    found = divided(work, placement, extra)

    def most(cut):
        return max(own + more for own, more in zip(loads_of(work, placement, cut), extra, strict=True))

    ways = [[0, *ends, len(work)] for ends in combinations(range(1, len(work)), ranks - 1)]
    cuts = [[end - start for start, end in pairwise(ends)] for ends in ways]
    assert sum(found) == len(work) and min(found) >= 1
    # Only a rank that must have a layer although it is too busy for any may get a larger one than necessary.
    assert most(found) <= min(map(most, cuts)) + (1.4 if any(extra) else 1e-9)


FLAGS = [
    *("--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128", "--micro-batch-size", "1"),
    *("--global-batch-size", "16", "--vocab-size", "60000", "--pipeline-model-parallel-size", "2"),
    *("--untie-embeddings-and-output-weights", "--bf16"),
]


def read(pattern, *flags):
    config = read_sizes([], [*FLAGS, f"--hybrid-layer-pattern={pattern}", *flags])
    return config, job_of(config), plan_of(config)


def test_bars_are_the_users_layout():
    config, job, plan = read("*-*|-")
    assert (job.model.layers, job.model.pattern, plan.layers) == (4, "*-*-", (3, 1))
    assert settings_of(config, plan, job) == {}
    config, job, plan = read("*-*-")
    assert plan.layers is None and settings_of(config, plan, job) == {"hybrid_layer_pattern": "*-|*-"}
    assert read("*|-|*|-")[2] == Plan("interleaved", chunks=2, layers=(1, 1, 1, 1))
    assert read("*-*-*", "--pipeline-schedule", "v-half", "--vocab-parallel")[2].layers == (1, 1, 1, 2)
    config, job, plan = read("*-*-/*-/*-", "--vocab-parallel")
    assert settings_of(config, replace(plan, layers=(1, 3)), job)["hybrid_layer_pattern"] == "*|-*-/*-/*-"
    assert uncounted(config) == []


def test_a_new_kind_of_layer_is_one_list_of_operations(monkeypatch):
    monkeypatch.setitem(LAYERS, "M", (lambda job: [Op("mixer", Matrix(256, 512, job.tokens), keeps=(7.0,))],))
    config, job, plan = read("M-*-")
    assert uncounted(config) == [] and layer_weights(job, "M") == 256 * 512
    assert predict(job, plan, H100).timeline.costs.F[0] < predict(read("*-*-")[1], plan, H100).timeline.costs.F[0]


def test_letters_that_are_not_known_are_named():
    config, job, _ = read("M-M-*-*-GD".replace("D", "G"))
    assert uncounted(config) == ["--hybrid-layer-pattern (M: counted as attention *)"]
    assert job.model.layers == 10 and uncounted(read("*-*-")[0]) == []


@pytest.mark.parametrize(
    ("pattern", "flags", "line"),
    [
        ("*-x", [], "'x' is not a layer's letter"),
        ("*-D", [], "cannot combine attention"),
        ("|", [], "has no layers"),
        ("*E", [], r"has experts \(E\), but their number is missing: add --num-experts"),
        ("*-/*/-", [], "make them the same"),
        ("*-*-", ["--pipeline-model-parallel-layout", "Et|tL"], "cannot be combined with --hybrid-layer-pattern"),
        ("*-*-", ["--num-virtual-stages-per-pipeline-rank", "2"], "cannot be combined with --hybrid-layer-pattern"),
    ],
)
def test_patterns_that_megatron_refuses_are_one_line(pattern, flags, line):
    with pytest.raises(UserError, match=line) as refused:
        read(pattern, *flags)
    assert "\n" not in str(refused.value)


CONFIGS = Path(__file__).parents[2] / "configs"
HYBRID = [
    *("--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128", "--micro-batch-size", "1"),
    *("--global-batch-size", "16", "--vocab-size", "16000", "--pipeline-model-parallel-size", "4", "--train-iters=1"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope", "--transformer-impl", "local"),
    *("--spec", "megatron_vp.mcore.hybrid_stack", "local_stack_spec", "--tokenizer-type", "NullTokenizer"),
    *("--mock-data", "--lr", "1e-4", "--max-position-embeddings", "128", "--eval-iters", "0", "--eval-interval", "10"),
]
PATTERN = ["--hybrid-layer-pattern", "*-*-*-*-"]


def run(*arguments):
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exception is None, found.exception
    return found.stdout


def test_simulate_says_which_letters_a_stage_has():
    bars = "*-*|-*-*|-*-*|-*-"
    found = run("simulate", *HYBRID, "--hybrid-layer-pattern", bars, "--vocab-parallel")
    assert f"segments by stage: {bars}" in found and "not counted" not in found


def test_segments_are_cut_in_finer_steps_than_layers():
    llama = [CONFIGS / "llama3_8b.yaml", "--pipeline-model-parallel-size", 6, "--global-batch-size", 24]
    words = [*llama, "--hybrid-layer-pattern", 32 * "*-", "--vocab-parallel", "--format", "json"]
    found = json.loads(run("simulate", *words))
    layers = found["plan"]["layers"]
    assert found["uncounted"] == [] and sum(layers) == 64
    assert any(count % 2 for count in layers), "half a layer more or less than a neighbour"


def test_the_recommended_pattern_passes_the_check_of_training():
    document = json.loads(run("plan", *HYBRID, *PATTERN, "--cpu", "--hardware", "cpu", "--format", "json"))
    best = document["plans"][document["best"]]
    pattern = Pattern.parse(best["settings"]["hybrid_layer_pattern"])
    assert pattern.letters == PATTERN[1] and (best["layers"] is None or list(pattern.layers) == best["layers"])
    args = check_job(["--cpu", *HYBRID, *shlex.split(best["flags"])], 4).args
    assert args.hybrid_layer_pattern == best["settings"]["hybrid_layer_pattern"]


@pytest.mark.parametrize("text", ["*-|*-", "-*|-*", "--*|-", "E|*"])
def test_bars_can_be_pasted(text, tmp_path):
    settings = {"hybrid_layer_pattern": text}
    (tmp_path / "overlay.yaml").write_text(yaml_of(settings))
    assert {leaf.key: leaf.value for leaf in read_leaves([tmp_path / "overlay.yaml"])} == settings
    words = shlex.split(flags_of(settings))
    assert words in (["--hybrid-layer-pattern", text], [f"--hybrid-layer-pattern={text}"])
    assert not any(word.startswith("-") for word in words[1:])
