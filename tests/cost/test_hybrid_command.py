"""Test `plan` and `simulate` for a job with a hybrid pattern: finer segments, and bars that training accepts."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.jobs.pattern_text import Pattern
from megatron_vp.jobs.settings import flags_of, yaml_of
from megatron_vp.jobs.yaml_files import read_leaves
from megatron_vp.mcore.start.preflight import check_job

CONFIGS = Path(__file__).parents[2] / "configs"
HYBRID = [
    *("--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128", "--micro-batch-size", "1"),
    *("--global-batch-size", "16", "--vocab-size", "16000", "--pipeline-model-parallel-size", "4", "--train-iters=1"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope", "--transformer-impl", "local"),
    *("--spec", "megatron_vp.mcore.hybrid_stack", "local_stack_spec", "--tokenizer-type", "NullTokenizer"),
    *("--mock-data", "--lr", "1e-4", "--max-position-embeddings", "128", "--eval-iters", "0", "--eval-interval", "10"),
]
PATTERN = ["--hybrid-layer-pattern", "*-*-*-*-*-*-*-"]


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
