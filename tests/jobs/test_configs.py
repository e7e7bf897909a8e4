"""Test that the installed Megatron interprets the configurations of the package as intended."""

import argparse
from pathlib import Path

import pytest

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
