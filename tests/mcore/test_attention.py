"""Test PyTorch's attention in Megatron's local layers against Megatron's own attention: losses and all gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness.training import Run, tiny_model, train

LLAMA_LIKE = {"group_query_attention": True, "num_query_groups": 2, "position_embedding_type": "rope"}
CASES = [
    ("as many groups as heads, vocabulary parallel", 2, {"vocab_parallel": True}),
    ("grouped queries, recomputed attention", 1, {**LLAMA_LIKE, "recompute_granularity": "selective"}),
]


@pytest.mark.parametrize(("size", "options"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_training_equals_megatrons_own_attention(size, options):
    arguments = {"pipeline_model_parallel_size": size, "train_iters": 2, **options}
    own = train(size, tiny_model(**arguments))
    fused = train(size, tiny_model(**arguments, core_attention="sdpa"))
    _assert_equal(fused, own)


def test_parts_of_sequences_train_as_whole_ones_do():
    """Context parallelism 2, vocabulary parallel, against plain Megatron on whole sequences."""
    arguments = {"train_iters": 2, **LLAMA_LIKE}
    whole = train(1, tiny_model(**arguments))
    ours = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "vocab_parallel": True}
    parts = train(4, tiny_model(**arguments, **ours, core_attention="sdpa"))
    _assert_equal(parts, whole)


def _assert_equal(found: Run, expected: Run) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        for name, gradient in theirs.gradients.items():
            distance = np.linalg.norm(ours.gradients[name] - gradient) / np.linalg.norm(gradient)
            assert distance < 1e-5, f"gradient of {name}: {distance:.1e}"


@pytest.mark.parametrize("rotated", [True, False])
def test_no_scores_and_no_projection_twice_in_memory(rotated):
    """What the backward keeps of an attention of 4 x 256 x 256 scores is queries, keys, values, context, statistics."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vp.mcore.model.attention import ScaledDotProductAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self")
    projected = torch.randn(256, 1, 4, 24, requires_grad=True) * 1.0
    query, key, value = projected.chunk(3, dim=-1)
    if rotated:
        query, key = query * 2.0, key * 2.0
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        context = attention(query, key, value, attention_mask=None)
    assert context.shape == (256, 1, 32)
    statistics = 4 * 256 * 4
    assert sum(kept.values()) == 4 * 256 * 32 * 4 + statistics


# PyTorch's own choice among several is cuDNN's on a Hopper device.
FLASH, CHOICE = [SDPBackend.FLASH_ATTENTION], [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernels", [FLASH, CHOICE], ids=["flash", "choice"])
@pytest.mark.parametrize("groups", [4, 2])
def test_fused_attention_on_a_device(groups, kernels):
    """Kernels that keep no scores take our layouts, grouped queries included, in bf16; against fp64."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vp.mcore.model.attention import ScaledDotProductAttention

    config = TransformerConfig(num_layers=1, hidden_size=512, num_attention_heads=4, attention_dropout=0.0)
    attention = ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(256, 2, heads, 128) for heads in (4, groups, groups)]
    wide = [torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64) for shape in shapes]
    narrow = [tensor.bfloat16().requires_grad_() for tensor in wide]
    with sdpa_kernel(kernels):
        found = attention(*narrow, attention_mask=None)
    gradient = torch.randn(found.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    found.backward(gradient)
    query, key, value = leaves = [tensor.detach().double().requires_grad_() for tensor in narrow]
    key, value = (tensor.repeat_interleave(4 // groups, dim=2) for tensor in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) / 128**0.5
    later = torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)
    expected = torch.einsum("bnij,jbnd->ibnd", scores.masked_fill(later, -torch.inf).softmax(-1), value).flatten(2)
    expected.backward(gradient.double())
    results = [(found, expected), *((narrow.grad, wide.grad) for narrow, wide in zip(narrow, leaves, strict=True))]
    for ours, reference in results:
        assert (ours.double() - reference).norm() / reference.norm() < 2e-2
