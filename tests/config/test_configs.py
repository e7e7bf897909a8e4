"""The configurations that we ship mean what they say to the installed Megatron."""

import argparse
from pathlib import Path

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore.config_file import arguments_from_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_there_are_configurations():
    assert {"quickstart.yaml", "gpt_4b.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_parses_with_megatrons_own_parser(parser, path):
    args = parser.parse_args(arguments_from_config(path, parser))
    assert args.num_layers % args.pipeline_model_parallel_size == 0
    assert args.hidden_size % args.num_attention_heads == 0
    assert args.seq_length <= args.max_position_embeddings


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("masked_softmax_fusion", "no_masked_softmax_fusion"),
        ("pipeline_parallel_size", "pipeline_model_parallel_size"),
        ("use_distributed_optimiser", "use_distributed_optimizer"),
        ("vocabsize", "vocab_size"),
    ],
)
def test_misspelt_megatron_argument_names_the_right_one(parser, tmp_path, wrong, right):
    (tmp_path / "job.yaml").write_text(f"{wrong}: 1\n")
    with pytest.raises(UserError, match=f"'{wrong}'.*nearest known one is '{right}'"):
        arguments_from_config(tmp_path / "job.yaml", parser)
