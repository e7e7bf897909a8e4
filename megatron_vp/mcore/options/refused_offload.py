"""Refusals of settings with which activations cannot be offloaded to host memory."""

from __future__ import annotations

import argparse

from megatron_vp.mcore.options.refusal import Refusal
from megatron_vp.mcore.settled import run_settings


def _chunks(a: argparse.Namespace) -> int:
    return a.virtual_pipeline_model_parallel_size or 1


def _asks_for_more(a: argparse.Namespace) -> bool:
    return a.offload_chunks.isdecimal() and int(a.offload_chunks) > _chunks(a)


OFFLOAD_REFUSALS = (
    Refusal(
        _asks_for_more,
        "--offload-chunks {offload_chunks} exceeds the number of chunks per rank of --pipeline-schedule "
        "{pipeline_schedule}: use half, all, or a smaller number",
    ),
    Refusal(
        lambda a: run_settings(a).offloads and a.pipeline_model_parallel_size < 2,
        "--offload-chunks {offload_chunks} with one pipeline stage has no other passes with which to overlap the "
        "copies: use --pipeline-model-parallel-size 2 or more, or leave --offload-chunks out",
    ),
    Refusal(
        lambda a: run_settings(a).offloads and a.recompute_granularity == "full",
        "--offload-chunks with --recompute-granularity full is not supported: recomputed layers keep only their "
        "inputs, so offloading would save little; use --recompute-granularity selective, or leave one of the two "
        "options out",
    ),
    Refusal(
        lambda a: run_settings(a).offloads and a.cuda_graph_impl != "none",
        "--offload-chunks with --cuda-graph-impl {cuda_graph_impl} is not supported: a CUDA graph needs its "
        "activations at the addresses that it was captured with; use --cuda-graph-impl none",
    ),
)
