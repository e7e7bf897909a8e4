"""NVIDIA's own jobs, read from a checkout of Megatron-LM and reduced to four CPU ranks.

All options that determine how a job trains are kept. Sizes become small. Options that need a GPU, files or hours are
left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from scripts.nvidia_jobs import Job, functional_tests
from tests.harness.ranks import ROOT
from tests.mcore import bridge_loop
from tests.mcore.nvidia_script import CHECKOUT

Options = dict[str, object]
STEPS = 3

DROPPED = (
    # Transformer Engine's layers, kernels and optimizer; on the CPU Megatron's local ones are built.
    *("transformer_impl", "attention_backend", "use_flash_attn", "moe_grouped_gemm", "moe_permute_fusion"),
    *("tp_comm_overlap", "apply_layernorm_1p", "fp8_format", "fp8_recipe", "fp8_param_gather", "fp4_format"),
    *("fp4_param_gather", "moe_router_fusion", "use_precision_aware_optimizer", "main_grads_dtype"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    # The CPU has gloo, and a stand-in for the kernels of DeepEP.
    *("distributed_backend", "moe_flex_dispatcher_backend"),
    # Rounding would hide a difference. Plain Megatron's fused cross entropy rounds gradients to bf16 in any job.
    *("bf16", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    "dist_ckpt_strictness",  # Megatron 0.19 fails at it with PyTorch 2.15, which describes tensors by more words
    # Random numbers differ between schedules, as they do between two plain ones.
    *("hidden_dropout", "attention_dropout", "moe_router_force_load_balancing"),
    # Mock data and a tokenizer without a file instead; few steps; no warm-up, in which nothing would change.
    *("data_path", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_type", "data_cache_path", "split"),
    *("exit_duration_in_mins", "exit_interval", "num_workers", "distributed_timeout_minutes"),
    *("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_init"),
    # Logs go to the console alone.
    *("tensorboard_dir", "wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir", "logging_level"),
    *("log_timers_to_tensorboard", "log_memory_to_tensorboard"),
)
"""What no shrunk job has."""
STORAGE = (
    *("save", "load", "save_interval", "save_retain_interval", "finetune", "auto_detect_ckpt_format"),
    *("async_save", "use_persistent_ckpt_worker"),
)

SMALL = {
    **{"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16},
    **{"seq_length": 128, "max_position_embeddings": 128, "micro_batch_size": 2, "make_vocab_size_divisible_by": 4},
    **{"num_experts": 4, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 64, "moe_router_topk": 2},
    **{"moe_router_num_groups": 2, "moe_router_group_topk": 1, "q_lora_rank": 32, "kv_lora_rank": 16},
    **{"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12, "dsa_indexer_n_heads": 4},
    **{"dsa_indexer_head_dim": 16, "dsa_indexer_topk": 32, "eval_interval": 2, "manual_gc_interval": 2},
    **{"check_weight_hash_across_dp_replicas_interval": 2, "log_interval": 1},
    # Adam makes whole updates of the rounding of small gradients, and two plain runs drift apart.
    **{"lr": 1e-5, "min_lr": 1e-6, "decoupled_lr": 2e-5, "decoupled_min_lr": 2e-6},
}
"""At most so much of each, where a job says it."""
LAYERS = 12
ADDED: Options = {
    "eval_iters": 1,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 39,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_workers": 0,
    "distributed_timeout_minutes": 1,
}


@cache
def _jobs() -> Mapping[str, Job]:
    named = functional_tests(Path(CHECKOUT or ""))
    return {f"{job.group.rpartition(': ')[2]}/{job.name}": job for job in named}


@cache
def _recipes() -> Mapping[str, Job]:
    """Megatron-Bridge's performance recipes as flags; they are built in a process of their own."""
    if (missing := bridge_loop.missing()) is not None:
        pytest.skip(missing)
    said = subprocess.check_output([sys.executable, ROOT / "scripts" / "bridge_recipes.py", "--words"], text=True)
    recipes = map(json.loads, said.splitlines())
    return {f"bridge/{name}": Job("bridge", name, tuple(words), {}) for name, words in recipes}


def shrunk(name: str, sizes: Options, keeps: tuple[str, ...] = ()) -> Options:
    """The options of a job by the names of their arguments, on four ranks.

    `sizes` replaces parallel sizes; what `keeps` names is not left out. Only a job that resumes saves. Attention is in
    the places of Mamba's layers, which have kernels for GPUs alone.
    """
    jobs = _recipes() if name.startswith("bridge/") else _jobs()
    if name not in jobs:
        pytest.skip(f"there is no job {name}")
    # The stand-in for Transformer Engine's kernels has none for norms of all parameters.
    dropped = {*DROPPED, *STORAGE, *(["log_params_norm"] if "transformer_impl" in keeps else [])} - {*keeps}
    job = {option: value for option, value in options_of(jobs[name]).items() if option not in dropped}
    for option, most in SMALL.items():
        if option in job:
            job[option] = min(most, type(most)(job[option]))
    for option, size in sizes.items():
        assert option in job, f"{name} has no {option}"
        job[option] = size
    modules = job.get("recompute_modules", [])
    if "moe_act" in modules and "moe_grouped_gemm" not in job:  # it is of grouped experts
        others = [] if isinstance(modules, str) else [each for each in modules if each != "moe_act"]
        job["recompute_modules"] = others
        if not others:
            del job["recompute_modules"], job["recompute_granularity"]
    if "async_save" in job:
        job["async_strategy"] = "mcore"  # the other's package needs a GPU
    _shrink_layers(job)
    _shrink_batches(job)
    if job.get("cuda_graph_impl", "none") != "none":
        job["cuda_graph_warmup_steps"] = 1  # captured after the first step
    if "fp16" in job:
        job["initial_loss_scale"] = 4096  # no step is skipped
    return {**job, **ADDED}


def options_of(job: Job) -> Options:
    """A command line by the names of arguments: True, a word, or a list of words. What is said twice has its last."""
    options: dict[str, list[str]] = {}
    for word in job.words:
        if word.startswith("--"):
            latest = options[word[2:].replace("-", "_")] = []
        else:
            latest.append(word)
    return {name: values if len(values) > 1 else values[0] if values else True for name, values in options.items()}


def _shrink_layers(job: Options) -> None:
    stages = int(job["pipeline_model_parallel_size"])
    if "hybrid_layer_pattern" in job:
        job["hybrid_layer_pattern"] = str(job["hybrid_layer_pattern"]).replace("M", "*")
        job["spec"] = ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"]
        return
    if "pipeline_model_parallel_layout" in job:
        layout = re.sub(r"t\*\d+", "t*2", str(job["pipeline_model_parallel_layout"]))
        job["pipeline_model_parallel_layout"] = layout
        layers = sum(int(count or 1) for count in re.findall(r"t(?:\*(\d+))?", layout))
    elif {"decoder_first_pipeline_num_layers", "account_for_loss_in_pipeline_split"} & job.keys():
        layers = int(job["num_layers"])
    else:
        chunks = stages * int(job.get("num_virtual_stages_per_pipeline_rank", 1))
        layers = min(LAYERS, int(job["num_layers"])) // chunks * chunks
    if "num_layers_per_virtual_pipeline_stage" in job:
        job["num_layers_per_virtual_pipeline_stage"] = min(2, int(job["num_layers_per_virtual_pipeline_stage"]))
    if "moe_layer_freq" in job:
        job["moe_layer_freq"] = f"([0]*1+[1]*{layers - 1})"
    job["num_layers"] = layers


def _shrink_batches(job: Options) -> None:
    parts = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    replicas = 4
    for part in parts:
        replicas //= int(job.get(part, 1))
    rows = int(job["micro_batch_size"]) * replicas
    group = int(job.get("microbatch_group_size_per_virtual_pipeline_stage", 4))
    batch = 2 * group * rows
    if "step_batch_size_schedule" in job:
        tokens = batch * int(job["seq_length"])
        job["step_batch_size_schedule"] = f"0:{batch} {tokens}:{2 * batch}"
        job["eval_global_batch_size"] = batch
        batch = 2 * batch - batch // STEPS
    else:
        job["global_batch_size"] = batch
    for option, value in (("train", STEPS), ("lr_decay", STEPS)):
        if f"{option}_samples" in job:
            job[f"{option}_samples"] = value * batch
        elif f"{option}_iters" in job:
            job[f"{option}_iters"] = value


def words_of(options: Options) -> list[str]:
    """The command line of options."""
    words: list[str] = []
    for name, value in options.items():
        values = [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
        words += ["--" + name.replace("_", "-"), *values]
    return words
