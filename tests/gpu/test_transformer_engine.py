"""Test Transformer Engine's layers in Megatron with separate B and W: p ranks on one GPU, or its Python code on CPU."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from contextlib import ExitStack
from functools import cache
from unittest import mock

import pytest
import torch

from tests.harness import ranks
from tests.harness.training import Run, _merge, tiny_model, train_case
from tests.mcore import engine
from tests.mcore.comparison import assert_as_close, assert_equal

VERSION = "2.20.2"
"""Of the Python that runs on CPU."""
TIMEOUT = 90
"""Seconds for the ranks of a run on a GPU, which start from nothing."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def shared_device(rank: int, world: int, device: str, arguments: list[str], fused: bool) -> Run | None:
    """`train_case` with all ranks on one device; ranks that hang say where before they are given up."""
    faulthandler.dump_traceback_later(0.7 * TIMEOUT, file=sys.stderr)
    with ExitStack() as around:
        if device == "cpu":
            around.enter_context(engine.on_cpu(VERSION, fused))
        else:
            os.environ["LOCAL_RANK"] = "0"
        from tests.gpu.staged import ranks_share  # of the plug-in that was imported last

        around.enter_context(ranks_share(torch.device(device, 0) if device == "cuda" else torch.device(device)))
        return train_case(rank, world, arguments)


@cache
def _trained(device: str, dtype: str | None, world: int, fused: bool, **changes: object) -> Run:
    options = {
        "distributed_backend": "gloo",
        "no_gradient_accumulation_fusion": not fused,
        # What PyTorch would compile for minutes.
        "no_bias_gelu_fusion": True,
        "no_bias_dropout_fusion": True,
        "bf16": dtype == "bf16",
    }
    arguments = tiny_model(**engine.MODEL | options | changes)
    case = (world, shared_device, device, arguments, fused)
    if device == "cpu":
        engine.require(VERSION)
        return _merge(ranks.run_ranks(*case, timeout=240))
    missing = "Transformer Engine is not installed"
    pytest.importorskip("transformer_engine.pytorch", reason=missing, exc_type=ImportError)
    with (
        # A CUDA context does not survive a fork.
        mock.patch.object(ranks, "_server", lambda: multiprocessing.get_context("spawn")),
        mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1", CUDA_DEVICE_MAX_CONNECTIONS="32"),
    ):
        return _merge(ranks.run_ranks(*case, timeout=TIMEOUT))


# Every token to every expert: in 16 bits a rounding could choose another.
EXPERTS = {**engine.ONE_CALL, "moe_router_topk": engine.ONE_CALL["num_experts"]}
CASES = [
    ("zb-h1", None, True, {}),
    ("zb-h1", "vocab-2", False, {}),
    ("v-half", None, False, {}),
    ("v-half", "vocab-1", True, {}),
    ("v-half", "vocab-2", True, EXPERTS),
    ("zb-h1", None, False, EXPERTS),
]
ON_DEVICES = [pytest.param("cuda", *case, marks=needs_gpu) for case in CASES]
# That the test itself holds, with and without vocabulary passes.
ON_DEVICES += [pytest.param("cpu", *case, marks=pytest.mark.slow) for case in (CASES[0], CASES[4])]


@pytest.mark.parametrize(("device", "schedule", "method", "fused", "model"), ON_DEVICES)
def test_a_split_backward_gives_the_losses_and_gradients_of_a_whole_one(device, schedule, method, fused, model):
    split = {**engine.pipeline(schedule, method), **model}
    if device == "cpu":
        assert_equal(_trained(device, None, 2, fused, **split), _trained(device, None, 1, fused, **model), 1e-6)
        return
    exact, plain = _trained(device, None, 1, False, **model), _trained(device, "bf16", 1, fused, **model)
    assert_as_close(_trained(device, "bf16", 2, fused, **split), plain, exact)
