"""Test the parts of Transformer Engine's linear layers that pass W needs: queues, fused or not, and biases."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.mcore.engine import LTS, MEGATRON, MINIMUM, NEWEST, on_cpu, require

WIDTH, ROWS, EXPERTS = 16, 8, 2


def _bound(dtype: torch.dtype, fused: bool) -> float:
    """Relative to the largest value: sums in fp32, and where a 16-bit product is rounded, half its spacing."""
    return 2**-8 if dtype == torch.bfloat16 and not fused else 1e-5


def delayed_as_autograd(_rank: int, _world_size: int, version: str, dtype: torch.dtype) -> int:
    """Two microbatches through every kind of layer: `main_grad` after both W is what autograd would make of them."""
    compared = 0
    with on_cpu(version, True):
        from megatron_vp.mcore import patch_table, patches

        with ExitStack() as put_back:
            put_back.callback(patches.undo, patches.apply(patch_table.patches_of("cpu platform")))
            import transformer_engine.pytorch as te

            kinds = (te.Linear, te.LayerNormLinear, te.GroupedLinear)
            for kind, fused, bias, apart in product(kinds, (True, False), (True, False), (True, False)):
                if apart and not bias:
                    continue
                _compare(kind, kind is te.GroupedLinear, fused, bias, apart, dtype)
                compared += 1
    return compared


def _compare(kind: type, grouped: bool, fused: bool, bias: bool, apart: bool, dtype: torch.dtype) -> None:
    from megatron_vp.mcore.model.delayed_weights import delaying_layers, take_delayed

    torch.manual_seed(0)
    layer = kind(
        *((EXPERTS, WIDTH, WIDTH) if grouped else (WIDTH, WIDTH)),
        bias=bias,
        return_bias=apart,
        params_dtype=dtype,
        delay_wgrad_compute=True,
        fuse_wgrad_accumulation=fused,
        device="cpu",
    )
    assert delaying_layers(layer) == (layer,)
    named = {name: parameter for name, parameter in layer.named_parameters() if not name.startswith("layer_norm")}
    for name, parameter in named.items():
        # A first product overwrites what it is fused with.
        parameter.main_grad = torch.full(parameter.shape, 7.0 if fused and name.startswith("weight") else 0.0)
        parameter.grad_added_to_main_grad = False
    expected = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in named.items()}
    sizes, waiting = [ROWS // 2] * EXPERTS, []
    for microbatch in range(2):
        rows, gradient = torch.randn(2, ROWS, WIDTH, dtype=dtype)
        rows.requires_grad_()
        output = layer(rows, *([sizes] if grouped else []), is_first_microbatch=microbatch == 0)
        if apart:
            output, outside = output
            outside = outside if isinstance(outside, list) else [outside] * EXPERTS
            output = output + torch.cat([each.expand(size, -1) for each, size in zip(outside, sizes, strict=True)])
        output.backward(gradient)
        waiting += take_delayed([layer], w_is_late=True)
        seen = torch.nn.functional.layer_norm(rows.detach().double(), [WIDTH]) if _has_norm(layer) else rows.detach()
        for expert in range(EXPERTS if grouped else 1):
            mine = slice(expert * ROWS // 2, (expert + 1) * ROWS // 2) if grouped else slice(None)
            suffix = str(expert) if grouped else ""
            expected[f"weight{suffix}"] += gradient[mine].double().t() @ seen[mine].double()
            if bias:
                expected[f"bias{suffix}"] += gradient[mine].double().sum(0)
    assert len(waiting) == 2
    for each in waiting:
        each()
    for name, parameter in named.items():
        off = (parameter.main_grad.double() - expected[name]).abs().max() / expected[name].abs().max()
        # A bias's gradient is rounded to its own dtype, and so are the rows that a norm hands on.
        rounded = name.startswith("bias") or _has_norm(layer)
        bound = _bound(dtype, fused and not rounded)
        assert off <= 2 * bound, (kind.__name__, name, fused, bias, apart, off.item())
        assert parameter.grad is None


def _has_norm(layer: torch.nn.Module) -> bool:
    return hasattr(layer, "layer_norm_weight")


@pytest.mark.parametrize(
    ("version", "dtype"),
    [
        (MEGATRON, torch.bfloat16),
        *(
            pytest.param(version, dtype, marks=pytest.mark.slow)
            for version, dtype in ((MINIMUM, torch.float32), (LTS, torch.bfloat16), (NEWEST, torch.float32))
        ),
    ],
)
def test_weight_gradients_that_were_delayed_are_those_of_autograd(version, dtype):
    assert run_ranks(1, delayed_as_autograd, require(version), dtype) == [18]
