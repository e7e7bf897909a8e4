"""Test that the installed Megatron interprets the configurations of the package as intended."""

import argparse
from pathlib import Path

import pytest

from megatron_vp.jobs.yaml_files import read_leaves
from megatron_vp.mcore.start.preflight import check_job

ROOT = Path(__file__).parents[2] / "configs"
MODELS = {path.stem: path for path in sorted(ROOT.glob("*.yaml"))}
METHODS = {path.stem: path for path in sorted((ROOT / "methods").glob("*.yaml"))}
PAPER = {  # Tables 5 and 6: GPUs, layers, heads, hidden size
    "gpt_4b": (8, 32, 24, 3072),
    "gpt_7b": (16, 32, 32, 4096),
    "gpt_10b": (16, 48, 32, 4096),
    "gpt_16b": (24, 48, 40, 5120),
    "gpt_21b": (32, 64, 40, 5120),
    "gpt_30b": (32, 64, 48, 6144),
}
# The smallest job of each other model.
RANKS = {
    **{"gemma2_9b": 8, "llama3_8b": 8, "llama3_8b_hybrid": 8, "llama3_70b": 64},
    **{"moonlight_16b": 16, "qwen3_8b": 4, "quickstart": 4},
}


def validated(*files: Path, ranks: int) -> argparse.Namespace:
    """The arguments of a job without data, as Megatron and the plug-in accept them."""
    files = (*files, ROOT / "data" / "mock.yaml")
    return check_job([f"--config={file}" for file in files] + ["--vocab-size", "512"], ranks).args


def test_every_model_is_listed():
    assert set(MODELS) == set(PAPER) | set(RANKS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("methods", [[], ["vocab-2"]], ids=["plain", "vocab-2"])
def test_model_is_accepted(name, methods):
    ranks = PAPER[name][0] if name in PAPER else RANKS[name]
    args = validated(MODELS[name], *(METHODS[method] for method in methods), ranks=ranks)
    assert args.data_parallel_size == args.expert_model_parallel_size
    assert args.vocab_parallel == bool(methods)
    assert args.save == args.load


@pytest.mark.parametrize("name", METHODS)
def test_method_is_accepted_and_says_its_name(name):
    methods = {name, "vocab-2"} if name != "vocab-1" else {name}
    args = validated(MODELS["llama3_8b"], *(METHODS[method] for method in sorted(methods)), ranks=8)
    assert name in (args.pipeline_schedule, args.vocab_parallel_algorithm)
    assert args.vocab_parallel


@pytest.mark.parametrize("name", PAPER)
def test_model_of_the_paper(name):
    gpus, layers, heads, hidden = PAPER[name]
    args = validated(MODELS[name], ranks=gpus)
    assert (args.pipeline_model_parallel_size, args.global_batch_size, args.micro_batch_size) == (gpus, 128, 1)
    assert (args.num_layers, args.num_attention_heads, args.hidden_size) == (layers, heads, hidden)
    assert args.untie_embeddings_and_output_weights
    assert args.ffn_hidden_size == 4 * hidden


def test_the_layers_of_an_uneven_layout_are_all_there():
    leaves = {leaf.key: leaf.value for leaf in read_leaves([MODELS["gemma2_9b"]])}
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout.from_str(leaves["pipeline_model_parallel_layout"], 8)
    layers = [sum(layer.name == "decoder" for layer in layout.layout[rank][0]) for rank in range(8)]
    assert layers == [5, 5, 5, 5, 5, 5, 6, 6]
    assert sum(layers) == leaves["num_layers"]
