"""Reads a job's arguments from its configuration files and its flags, which override the files."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import CPU, flags_in, name_of, option_of
from megatron_vp.jobs.config_words import arguments_from_leaves
from megatron_vp.jobs.known_options import listed_parser, refuse_unknown, refuse_wrong_words
from megatron_vp.jobs.yaml_files import Leaf, read_leaves

ALGORITHM_ALONE = (
    "--vocab-parallel-algorithm {vocab_parallel_algorithm} has no effect without --vocab-parallel: add "
    "--vocab-parallel, or leave --vocab-parallel-algorithm out"
)
"""The error that every command reports if an algorithm is given without vocabulary parallelism."""

CPU_NAME = name_of(CPU)
"""The argument name of `--cpu`, a flag that is removed before the training script parses its arguments."""

SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "mtp_num_layers",
)
OTHERS = (
    *("vocab_parallel", "vocab_parallel_algorithm", "vocab_shards"),
    *("pipeline_schedule", "activation_limit", "offload_chunks", "pipeline_model_parallel_layout"),
    *("hybrid_layer_pattern", "hybrid_override_pattern"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("swiglu", "quick_geglu", "group_query_attention", "untie_embeddings_and_output_weights"),
    *("hidden_dropout", "attention_dropout", "sequence_parallel", "use_distributed_optimizer"),
    *("recompute_granularity", "recompute_modules", "bf16", "fp16", "accumulate_allreduce_grads_in_fp32"),
    *("fp8_format", "fp8_recipe", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    *("transformer_impl", "core_attention", "position_embedding_type", "qk_layernorm", "qk_l2_norm"),
    *("no_bias_swiglu_fusion", "no_bias_gelu_fusion", "disable_bias_linear"),
    *("attention_softmax_in_fp32", "apply_query_key_layer_scaling"),
    *("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
    *("expert_tensor_parallel_size", "fp8_param_gather", "grad_reduce_in_bf16"),
    *("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("attention_backend", "window_size", "window_attn_skip_freq"),
    *("moe_token_dispatcher_type", "activation_func_clamp_value"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("moe_layer_freq", "moe_shared_expert_intermediate_size", "step_batch_size_schedule"),
)
"""Arguments other than SIZES from which the cost model computes times and memory."""
LEAST = {"mtp_num_layers": 0}
"""Smallest accepted values of sizes; all other sizes must be at least 1."""
LARGEST_SIZE = 10**9
LARGEST = {
    "mtp_num_layers": 2**10,
    "hidden_size": 2**20,
    "num_attention_heads": 2**16,
    "ffn_hidden_size": 2**22,
    "kv_channels": 2**16,
    "vocab_size": 2**28,
    "padded_vocab_size": 2**28,
    "num_experts": 2**16,
    "moe_ffn_hidden_size": 2**22,
    "seq_length": 2**26,
    "micro_batch_size": 2**20,
}
"""Largest accepted values of sizes, to catch typos; LARGEST_SIZE limits all other sizes."""


@dataclass(frozen=True)
class JobConfig:
    """A job's arguments by long name, with underscores; a switch that is on has the value True."""

    values: dict[str, Any]
    """Values as YAML would read them: text that looks like a number is a number, and several values are a list."""
    origins: dict[str, Leaf | str]
    """Where each value was set, for messages: a `key: value` pair of a file, or a flag of the command line."""

    def of_files(self) -> dict[str, Any]:
        """Options that the files set to a value other than null and that no flag overrides."""
        return {
            name: value
            for name, value in self.values.items()
            if isinstance(self.origins[name], Leaf) and value is not None
        }

    def unused(self, used: Collection[str]) -> list[str]:
        """The options that are set but not listed in `used`, in command-line form such as `--num-layers`."""
        given = {name for name, value in self.values.items() if value is not None and value is not False}
        return sorted(option_of(name) for name in given.difference(used))

    def whole_number(self, name: str, default: int) -> int:
        """The value of an integer argument. Raises UserError if it is not an integer."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{self.origins[name]} {value} is not an integer")
        return value


def read_job_config(files: Sequence[str | os.PathLike[str]], flags: Sequence[str]) -> JobConfig:
    """Read configuration files, then flags (`--name value`, `--name=value`, `--switch`). Later values override earlier
    ones.

    Raises UserError for a file that cannot be read, a key that is in two sections, and a word that is not a flag.
    """
    return _job_config(read_leaves(files), flags)


def _job_config(leaves: Sequence[Leaf], flags: Sequence[str]) -> JobConfig:
    values: dict[str, Any] = {}
    origins: dict[str, Leaf | str] = {}
    for leaf in leaves:
        before = origins.get(leaf.key)
        if isinstance(before, Leaf):
            raise UserError(f"{leaf} was already set in {before.section}; delete one of the two settings")
        values[leaf.key], origins[leaf.key] = leaf.value, leaf
    for option, texts in flags_in(flags):
        name = name_of(option)
        found = [_value(text) for text in texts]
        values[name], origins[name] = (True if not found else found[0] if len(found) == 1 else found), option_of(name)
    return JobConfig(values, origins)


def read_sizes(
    files: Sequence[str | os.PathLike[str]], flags: Sequence[str], commands_own: Sequence[str] = ()
) -> JobConfig:
    """Read a job as `read_job_config` does, and check that each size is None or a whole number within its limits.

    `commands_own` lists the options of the calling command, which are also suggested for a misspelled option. Also
    raises UserError for an unknown argument, a value that its option does not accept, NaN or infinity.
    """
    leaves = read_leaves(files)
    config = _job_config(leaves, flags)
    for name, origin in config.origins.items():
        if origin != CPU:
            refuse_unknown(name, origin, commands_own)
    for name in SIZES:
        value, least = config.values.get(name), LEAST.get(name, 1)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            bare = value is True and not isinstance(config.origins[name], Leaf)
            said = "needs a value:" if bare else f"{value!r} is not"
            raise UserError(f"{config.origins[name]} {said} a whole number of at least {least}")
        largest = LARGEST.get(name, LARGEST_SIZE)
        if value is not None and value > largest:
            raise UserError(f"{config.origins[name]} {value} is too large; give at most {largest}")
    for name, value in config.values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{config.origins[name]} {value} is not a finite number")
    arguments_from_leaves(leaves, listed_parser())
    refuse_wrong_words([word for word in flags if word != CPU])
    return config


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
