"""Transformer Engine's own Python code on the CPU, with a stand-in for its compiled modules (`engine_kernels`).

Its layers, their autograd functions, their queues of weight gradients, its attention and its optimizer come from its
wheel, unmodified. Only its compiled modules need a device. `scripts/setup_transformer_engine.sh` downloads the wheel.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness.ranks import ROOT, run_ranks
from tests.harness.training import Run, _merge, tiny_model, train_case
from tests.mcore import engine_blocks, engine_fp4, engine_kernels
from tests.mcore.case_parts import way_options

MODEL = {
    "hidden_size": 64,
    "lr": 1e-5,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "vocab_size": 63,
    "transformer_impl": "transformer_engine",
    "attention_backend": "unfused",
    "eval_iters": 1,
    "eval_interval": 2,
}
"""What its cases change in the tiny model, to sizes that its kernels take."""
BOUND = 1e-6
NEWEST, MEGATRON, LTS, MINIMUM = "2.20.2", "2.17.1", "2.16.1", "2.8.0"
"""Of Transformer Engine: the newest, those that Megatron 0.19 and 0.18 are tested with, the oldest that works."""
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 10000,
}
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}
SEQUENCE_PARALLEL = {**TENSOR_PARALLEL, "sequence_parallel": True}
LLAMA = {
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE_CALL = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_grouped_gemm": True,
    "no_bias_dropout_fusion": True,  # Megatron's condition for experts with biases
}
FUSED, APART = True, False
"""Accumulation of weight gradients in their product."""


def require(version: str) -> str:
    """The version, where its Python is here; else the test is skipped, with the command that gets it."""
    if not _folder(version).is_dir():
        pytest.skip(f"needs Transformer Engine's Python: scripts/setup_transformer_engine.sh {version}")
    return version


def _folder(version: str) -> Path:
    return ROOT / f".transformer-engine-{version}"


@contextmanager
def imported(version: str, apex: bool = True, capability: int = 9) -> Iterator[None]:
    """In a process of its own: inside, Megatron and its plug-in are imported anew and find this Transformer Engine.

    They find Apex's accumulation of weight gradients with `apex`. Transformer Engine is told that there is a device of
    compute capability 9.0, or another whole number, wherever it asks. Nobody else is.
    """
    forgotten = ("transformer_engine", "megatron", "megatron_vp", "pretrain_gpt_vp")
    for name in [name for name in sys.modules if name.partition(".")[0] in forgotten]:
        del sys.modules[name]

    def by_engine() -> bool:
        return sys._getframe(2).f_globals["__name__"].startswith("transformer_engine.")

    on_device, there_is_one = torch.Tensor.is_cuda, torch.cuda.is_available
    device = SimpleNamespace(major=capability, minor=0, multi_processor_count=1)
    with (
        mock.patch.object(sys, "path", [str(_folder(version)), *sys.path]),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: by_engine() or on_device.__get__(self))),
        mock.patch.object(torch.cuda, "is_available", lambda: by_engine() or there_is_one()),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device_=None: device),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device_=None: (device.major, device.minor)),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.cuda, "device", nullcontext),
        mock.patch.dict(
            sys.modules,
            {
                "transformer_engine_torch": engine_kernels.compiled_module(),
                "fused_weight_gradient_mlp_cuda": engine_kernels.apex_module() if apex else None,
                # For exports to ONNX: older versions import a package for it that is not here.
                "transformer_engine.pytorch.onnx_extensions": engine_kernels.compiled_module(),
            },
        ),
    ):
        # It looks for its libraries when it is imported, but for a build; without frameworks it does not miss them.
        with mock.patch.dict(os.environ, NVTE_PROJECT_BUILDING="1", NVTE_FRAMEWORK="none"):
            common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        importlib.import_module("transformer_engine.pytorch")
        # Recomputation puts the device's random numbers back; here they are the CPU's.
        distributed = importlib.import_module("transformer_engine.pytorch.distributed")
        generator = torch.default_generator
        distributed._get_cuda_rng_state = lambda *_, **__: generator.get_state()
        distributed._set_cuda_rng_state = lambda state, *_, **__: generator.set_state(state)
        if capability >= 10:
            # Gathers of fp4 are several messages at once, which gloo does not join.
            distributed.torch = engine_fp4.without_joined_messages(torch)
            distributed.pad_columnwise_scale_inv = engine_fp4.padded  # a Triton kernel
            storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage")
            storage._FromNVFP4Func.forward = staticmethod(engine_fp4.read_in_place)
            storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage")
            storage._FromMXFP8Func.forward = staticmethod(engine_blocks.read_in_place)
        assert importlib.import_module("transformer_engine").__version__ == version
        yield


@dataclass
class Products:
    """The products that make the gradients of Transformer Engine's weights, on one rank.

    queued: put into a layer's queue in the backward.
    in_w: computed in pass W.
    elsewhere: computed at any other time.
    waiting: in queues and between B and W, at most.
    fused: of those in W, computed into `main_grad`.
    empty: of those in W, over the tokens of an expert that got none.
    quantised: of all, with operands in fp8.
    """

    queued: int = 0
    in_w: int = 0
    elsewhere: int = 0
    waiting: int = 0
    fused: int = 0
    empty: int = 0
    quantised: int = 0


@contextmanager
def counted_products() -> Iterator[Products]:
    """Inside `imported`: count the products that make weights' gradients, by where they are computed."""
    import transformer_engine_torch as compiled
    from transformer_engine.pytorch.module._common import WeightGradStore

    from megatron_vp.mcore.model import delayed_weights

    found = Products()
    in_w: torch.nn.Module | None = None

    def put(self: Any, operands: list, product: Callable) -> None:
        grouped = getattr(product, "func", None)
        assert (grouped or product).__module__.startswith("transformer_engine.pytorch.")
        found.queued += len(operands[0]) if grouped else 1
        found.waiting = max(found.waiting, found.queued - found.in_w)
        put_as_ever(self, operands, product)

    def accumulate(layer: Any, operands: list, *others: Any) -> None:
        nonlocal in_w
        assert layer.fuse_wgrad_accumulation or operands[-1] is None or not hasattr(layer, "num_gemms")
        in_w = layer
        accumulate_as_ever(layer, operands, *others)
        in_w = None

    def count(outputs: list[torch.Tensor | None], inputs: list[Any]) -> None:
        found.quantised += sum(not isinstance(rows, torch.Tensor) for rows in inputs)
        found.elsewhere += 0 if in_w else len(inputs)
        if in_w:
            main_gradients = [
                each.main_grad for each in delayed_weights._weights_and_biases(in_w) if each.requires_grad
            ]
            found.in_w += len(inputs)
            found.fused += sum(any(each is output for each in main_gradients) for output in outputs)
            found.empty += sum(isinstance(rows, torch.Tensor) and not rows.numel() for rows in inputs)

    def generic_gemm(*args: Any, **kwargs: Any) -> tuple:
        if args[3]:  # dW = dY^T X has the one transposed second operand
            count([args[4]], [args[0]])
        return engine_kernels.generic_gemm(*args, **kwargs)

    def te_general_grouped_gemm(*args: Any) -> list[torch.Tensor]:
        if args[3]:
            count(args[4], args[0])
        return engine_kernels.te_general_grouped_gemm(*args)

    put_as_ever, accumulate_as_ever = WeightGradStore.put, delayed_weights.accumulate
    with (
        mock.patch.object(WeightGradStore, "put", put),
        mock.patch.object(delayed_weights, "accumulate", accumulate),
        mock.patch.object(compiled, "generic_gemm", generic_gemm),
        mock.patch.object(compiled, "te_general_grouped_gemm", te_general_grouped_gemm),
    ):
        yield found


def bytes_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather fp8 weights as bytes, synchronously: over gloo, coalescing them with 16-bit weights can corrupt both."""

    def gather(whole: torch.Tensor, part: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if whole.dtype != torch.uint8:
            return original(whole, part, group=group, async_op=async_op)
        return torch.distributed.all_gather(list(whole.chunk(group.size())), part, group=group)

    return gather


@contextmanager
def on_cpu(version: str, fused: bool, apex: bool = True, capability: int = 9) -> Iterator[None]:
    """As `imported`, with a plug-in that leaves the choice of layers, and of fused accumulation, to the flags."""
    chosen_here = {"--transformer-impl"} | ({"--no-gradient-accumulation-fusion"} if fused else set())
    with imported(version, apex, capability):
        from megatron_vp.mcore.platform import flags, installed

        choices = flags._choices
        buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
        with (
            mock.patch.object(buffers, "dist_all_gather_func", bytes_apart(buffers.dist_all_gather_func)),
            mock.patch.object(flags, "_choices", lambda *of: [c for c in choices(*of) if c[0] not in chosen_here]),
            mock.patch.object(installed, "hide_what_needs_a_gpu", lambda: None),
            mock.patch.dict(os.environ, NVTE_UNFUSED_FP8_UPDATE="1"),  # of scales, in Python
        ):
            yield


def engine_case(
    rank: int,
    world_size: int,
    version: str,
    arguments: list[str],
    fused: bool,
    same_weights: bool,
    apex: bool,
    hook: Callable[[list], list] | None = None,
) -> tuple[Run | None, Products]:
    """`train_case` with Transformer Engine's layers; `fused` leaves Megatron's fused accumulation on."""
    capability = 10 if {"--fp4-format", "mxfp8"} & set(arguments) else 9
    with on_cpu(version, fused, apex, capability), counted_products() as products:
        return train_case(rank, world_size, arguments, same_weights=same_weights, hook=hook), products


@cache
def trained(
    version: str,
    world_size: int,
    fused: bool,
    same_weights: bool = True,
    apex: bool = True,
    hook: Callable[[list], list] | None = None,
    **changes: object,
) -> tuple[Run, list[Products]]:
    """`engine_case` on `world_size` ranks; `changes` are of `tiny_model` and `MODEL`."""
    arguments = tiny_model(**MODEL | changes)
    given = require(version), arguments, fused, same_weights, apex, hook
    ranks = run_ranks(world_size, engine_case, *given, timeout=240)
    return _merge([run for run, _ in ranks]), [products for _, products in ranks]


def pipeline(schedule: str, method: str | None) -> dict[str, object]:
    """The options of a schedule over two stages."""
    return way_options(f"{schedule}/{method or 'none'}", 2)


def assert_checkpoint_moves(
    folder: Path, schedule: str, method: str | None, sharded: bool, fused: bool = FUSED, **model: object
) -> None:
    """Two ranks save, plain Megatron goes on and saves, two ranks go on; `sharded`: with the distributed optimizer."""
    common = {"eval_iters": 0, "train_iters": 4, "use_distributed_optimizer": sharded, **model}
    saved = {**common, "save": folder, "dist_ckpt_optim_fully_reshardable": sharded}
    split, resumed = pipeline(schedule, method), {"same_weights": False, "load": folder}
    runs = [
        trained(NEWEST, 2, fused, **split, **saved, save_interval=2, exit_interval=2),
        trained(NEWEST, 1, fused, **saved, **resumed, save_interval=3, exit_interval=3),
        trained(NEWEST, 2, fused, **split, **common, **resumed),
    ]
    unmoved, _ = trained(NEWEST, 1, fused, **common)
    steps = [step for run, _ in runs for step in run.steps]
    assert [step.loss for step in steps] == pytest.approx(unmoved.losses, rel=BOUND)
    assert [step.grad_norm for step in steps] == pytest.approx(unmoved.grad_norms, rel=BOUND)
