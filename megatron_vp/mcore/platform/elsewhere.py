"""A job for GPUs, checked on a machine that has none: a login node, say.

Megatron asks the device for its compute capability, and Transformer Engine for its version, while it validates
arguments. What a current node would answer stands in for both; nothing may be computed.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from megatron_vp.mcore.platform import flags

CAPABILITY = (9, 0)
ENGINE = "2.20.2"

# Megatron refuses fusions whose function Transformer Engine does not bring.
_FUSED = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    ),
}


@contextmanager
def devices_elsewhere(engine: bool) -> Iterator[None]:
    """Inside, this process takes itself for one with a CUDA device, and with `engine` for one with Transformer Engine.

    Imports nothing of Megatron.
    """
    properties = types.SimpleNamespace(major=CAPABILITY[0], minor=CAPABILITY[1])
    with (
        mock.patch.object(flags, "nodes_have_engine", engine),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
    ):
        yield


def assumed(transformer_impl: str) -> str:
    """What is taken for granted of the nodes that shall run a job with these layers."""
    engine = transformer_impl == "transformer_engine" and not flags.engine_is_here()
    return f"compute capability {'.'.join(map(str, CAPABILITY))}" + (f", Transformer Engine {ENGINE}" if engine else "")


@contextmanager
def engine_elsewhere() -> Iterator[None]:
    """Inside, and inside `devices_elsewhere`, Megatron finds Transformer Engine where its nodes are to have it."""
    if not flags.nodes_have_engine or flags.engine_is_here():
        yield
        return
    with ExitStack() as put_back:
        utilities = importlib.import_module("megatron.core.utils")
        put_back.enter_context(mock.patch.object(utilities, "_te_version", utilities.PkgVersion(ENGINE)))
        for module, names in _FUSED.items():
            for name in names:
                replaced = mock.patch.object(importlib.import_module(module), name, object())
                put_back.enter_context(replaced)
        yield
