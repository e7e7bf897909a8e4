"""A job that `plan` and `simulate` can predict quickly, and helpers that run these commands on it."""

from pathlib import Path

from typer.testing import CliRunner

from megatron_vp.cli.app import app

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = """
model:
  num_layers: 8
  hidden_size: 1024
  num_attention_heads: 16
  seq_length: 1024
  vocab_size: 100000
  untie_embeddings_and_output_weights: true
parallelism:
  pipeline_model_parallel_size: 4
batch:
  micro_batch_size: 1
  global_batch_size: 8
precision:
  bf16: true
data:
  tokenizer_model: somewhere
"""


def run(*arguments):
    """The result of a `megatron-vp` command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
