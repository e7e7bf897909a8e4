"""Test NVIDIA's own jobs, reduced to four CPU ranks, in NVIDIA's own scripts: every step equals plain Megatron's.

    MEGATRON_LM=~/Megatron-LM .venv/bin/python -m pytest -q -m slow tests/mcore/test_nvidia_jobs_shrunk.py

Both runs have the same ranks and the job's own schedule; one of them splits the vocabulary layers over the pipeline.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import sqrt
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, train_case
from tests.mcore.case_parts import FP32
from tests.mcore.comparison import assert_equal, largest_distance
from tests.mcore.engine import FUSED, NEWEST, on_cpu, require
from tests.mcore.nvidia_script import NvidiaScript, needs_checkout
from tests.mcore.shrunk_job import STEPS, STORAGE, Options, shrunk, words_of
from tests.mcore.test_flex_dispatcher import fused_combine, fused_dispatch
from tests.mcore.test_layer_graphs import captured_on_cpu, replayed_on_cpu

pytestmark = [needs_checkout, pytest.mark.slow]

DATA = {"pipeline_model_parallel_size": 2}
"""The other two ranks hold a replica."""

# The job, and the parallel sizes that four ranks have instead of its own.
JOBS = {
    "gpt/gpt3_mcore_te_tp2_pp2_mla": {},
    "gpt/gpt3_mcore_te_tp2_pp2_dsa": {},
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline": {},
    "gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split": {},
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather": DATA,
    "gpt/gpt3_mcore_te_tp2_pp2_cp2": {"tensor_model_parallel_size": 1},
    "gpt/gpt3_15b_8t_release_sm_gb200": {"tensor_model_parallel_size": 2},
    "hybrid/hybrid_mr_mcore_te_tp1_pp2_vpp2_cp1_dgx_a100_1N8G": {},
    "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm": {"expert_model_parallel_size": 2},
    "mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release": {**DATA, "expert_model_parallel_size": 2},
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8": {"expert_model_parallel_size": 2},
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph": {"expert_model_parallel_size": 2},
}
RESUMED = {
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_calculate_per_token_loss": {},
    "moe/gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer": {},
}
TWO_CHUNKS = {**DATA, "pipeline_model_parallel_layout": "Et|t|tt|tmL"}
# The same, of Megatron-Bridge's performance recipes, whose flags NVIDIA's script trains.
RECIPES = {
    "bridge/deepseek_v3_pretrain_256gpu_gb300_bf16": {**TWO_CHUNKS, "expert_model_parallel_size": 2},
    "bridge/llama3_70b_sft_32gpu_gb300_bf16": {**DATA, "num_virtual_stages_per_pipeline_rank": 2},
    "bridge/qwen3_235b_a22b_pretrain_64gpu_gb300_bf16": {**DATA, "num_layers": 6, "expert_model_parallel_size": 2},
}
"""All with CUDA graphs of layers."""
PAIRS = {"micro_batch_size": 2}
"""The stand-in for fp4 has two sequences in a byte."""
ROUNDED = {
    "bridge/llama3_70b_pretrain_64gpu_h100_fp8cs": {
        **{**DATA, "num_virtual_stages_per_pipeline_rank": 2, "tensor_model_parallel_size": 2},
    },
    "bridge/llama3_70b_pretrain_64gpu_gb300_nvfp4": {**DATA, **PAIRS, "num_virtual_stages_per_pipeline_rank": 2},
}
"""Layers in fp8 and fp4."""
APART = sqrt(2)
"""How far apart two independent roundings are."""
FORMATS = ("fp8_format", "fp8_recipe", "fp8_param_gather", "fp4_format", "fp4_param_gather")
IN_ENGINE = {
    "gpt/gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute": ("transformer_impl", "attention_backend"),
    "gpt/gpt3_mcore_te_tp2_pp2_dsa": ("transformer_impl",),
}
"""Of these, what Transformer Engine's layers keep over the stand-in for its kernels."""


_GRAPHS = {"none": nullcontext, "transformer_engine": captured_on_cpu, "local": replayed_on_cpu}


class JobScript(NvidiaScript):
    """With stand-ins for the kernels of the flex dispatcher, DeepSeek's sparse attention and CUDA graphs of layers."""

    def __init__(self, name: str, settings: dict[str, object], graphs: str) -> None:
        super().__init__(name, settings)
        self._graphs = graphs

    def main(self) -> None:
        from megatron.core.transformer.experimental_attention_variant import dsa
        from megatron.core.transformer.moe import token_dispatcher

        dispatcher = {
            "fused_dispatch": fused_dispatch,
            "fused_combine": fused_combine,
            "set_deepep_num_sms": lambda number: None,
        }
        with (
            mock.patch.multiple(token_dispatcher, **dispatcher),
            mock.patch.object(dsa, "rotate_activation", hadamard_transform),
            _GRAPHS[self._graphs](),
        ):
            super().main()


def hadamard_transform(rows: torch.Tensor) -> torch.Tensor:
    """The orthogonal Hadamard transform of the last dimension, a power of two."""
    size = rows.shape[-1]
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return rows @ matrix.to(rows) * size**-0.5


def trained(options: Options, settings: dict[str, object], same_weights: bool = True) -> Run:
    """A run of the job in the script that trains it."""
    script = "pretrain_hybrid.py" if "hybrid_layer_pattern" in options else "pretrain_gpt.py"
    case = train_case
    if options.get("transformer_impl") == "transformer_engine":
        require(NEWEST)
        case = engine_case
    elif "multi_latent_attention" in options or int(options.get("context_parallel_size", 1)) > 1:
        settings = {"core_attention": "sdpa", **settings}  # Megatron's local attention has neither
    watched = JobScript(script, settings, str(options.get("cuda_graph_impl", "none")))
    return _merge(run_ranks(4, case, words_of(options), script=watched, same_weights=same_weights, timeout=400))


def engine_case(rank: int, world_size: int, arguments: list[str], **how: Any) -> Run | None:
    """`train_case` with Transformer Engine's layers, and with weight gradients that are added in their product."""
    with on_cpu(NEWEST, FUSED, capability=10 if "--fp4-format" in arguments else 9):
        return train_case(rank, world_size, arguments, **how)


def ours(options: Options) -> dict[str, object]:
    """The settings that make a run of the job vocabulary parallel, under its own schedule."""
    stages = {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}
    pattern = str(options.get("hybrid_layer_pattern", ""))
    layout = str(options.get("pipeline_model_parallel_layout", ""))
    chunked = stages & options.keys() or max(pattern.count("|"), layout.count("|")) >= int(
        options["pipeline_model_parallel_size"]
    )
    return {
        "vocab_parallel": True,
        "vocab_shards": "even",
        "pipeline_schedule": "interleaved" if chunked else "1f1b",
        "vocab_parallel_algorithm": "vocab-1" if chunked else "vocab-2",
    }


@pytest.mark.parametrize("name", [*JOBS, *RECIPES])
def test_a_job_trains_as_in_plain_megatron(name):
    options = shrunk(name, (JOBS | RECIPES)[name], IN_ENGINE.get(name, ()))
    # Graphs of layers change nothing, so plain Megatron trains without them.
    plain = trained({option: value for option, value in options.items() if not option.startswith("cuda_graph")}, {})
    split = trained(options, ours(options))
    assert plain.rows_on != split.rows_on
    assert plain.losses[0] != plain.losses[-1]
    assert_equal(split, plain, FP32)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_recipe_of_megatron_bridges_in_fp8_or_fp4_is_as_close_as_two_roundings(name):
    """As `tests/mcore/test_engine_formats.py` compares. The unrounded run has layers in bf16."""
    options = shrunk(name, ROUNDED[name], (*FORMATS, "bf16", "moe_grouped_gemm"))
    options |= {"transformer_impl": "transformer_engine", "attention_backend": "unfused"}
    exact = trained({option: value for option, value in options.items() if option not in FORMATS}, {})
    plain, split = trained(options, {}), trained(options, ours(options))
    assert plain.rows_on != split.rows_on
    rounding = max(abs(a - b) for a, b in zip(plain.losses, exact.losses, strict=True))
    assert rounding > 0 and split.losses == pytest.approx(plain.losses, abs=APART * rounding)
    assert 0 < largest_distance(split, plain) <= APART * largest_distance(plain, exact)


@pytest.mark.parametrize("name", RESUMED)
def test_a_job_of_nvidias_resumes_as_in_plain_megatron(name, tmp_path):
    """Each run saves a checkpoint and goes on from its own in other processes."""
    options = shrunk(name, RESUMED[name], STORAGE)
    runs = []
    for settings in ({}, ours(options)):
        folder = {"save": str(tmp_path / f"{len(runs)}"), "load": str(tmp_path / f"{len(runs)}")}
        first = trained({**options, **folder, "save_interval": 2, "exit_interval": 2}, settings)
        runs.append((first, trained({**options, **folder}, settings, same_weights=False)))
    (plain, plain_resumed), (split, split_resumed) = runs
    assert (len(plain.steps), len(plain_resumed.steps)) == (2, STEPS - 2)
    assert_equal(split, plain, FP32)
    assert_equal(split_resumed, plain_resumed, FP32)
