"""Vocabulary parallelism together with Megatron's other parallelism: the same losses as plain Megatron.

A case is a line. Reduced gradients lie scattered over the ranks, so losses stand for them: the loss of a step comes
from the weights that all updates before it made.
"""

from __future__ import annotations

import pytest

from tests.harness.training import tiny_model, train

OVERLAPPED = {"overlap_grad_reduce": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
BOTH = {**OVERLAPPED, **DISTRIBUTED, "overlap_param_gather": True}

# Name, ranks, p, options of both runs, largest relative distance of a loss.
CASES = [
    ("data parallel", 4, 2, {}, 2e-6),
    ("overlapped reduction", 4, 2, OVERLAPPED, 2e-6),
    ("distributed optimizer", 4, 2, DISTRIBUTED, 2e-6),
    ("distributed optimizer, all overlapped", 4, 2, BOTH, 2e-6),
    ("all overlapped, not aligned between ranks", 4, 2, {**BOTH, "no_align_grad_reduce": True}, 2e-6),
    ("all overlapped, tied, bf16", 4, 2, {**BOTH, "bf16": True, "untie_embeddings_and_output_weights": False}, 2e-4),
    ("loss averaged over tokens", 4, 2, {"calculate_per_token_loss": True}, 2e-6),
    (
        "recomputed activations",
        2,
        2,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        2e-6,
    ),
    (
        "Llama-like",
        2,
        2,
        {
            "normalization": "RMSNorm",
            "swiglu": True,
            "group_query_attention": True,
            "num_query_groups": 2,
            "position_embedding_type": "rope",
            "disable_bias_linear": True,
        },
        2e-6,
    ),
    ("uneven layers", 2, 2, {"decoder_last_pipeline_num_layers": 1}, 2e-6),
    ("decoupled learning rate, weight decay", 2, 2, {"decoupled_lr": 3e-3, "weight_decay": 0.3}, 2e-6),
]


@pytest.mark.parametrize(("ranks", "size", "options", "bound"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_losses_equal_plain_megatron(ranks, size, options, bound):
    arguments = {
        "train_iters": 5,
        "global_batch_size": 16,
        "pipeline_model_parallel_size": size,
        "eval_iters": 1,
        "eval_interval": 3,
        **options,
    }
    plain = train(ranks, tiny_model(**arguments))
    split = train(ranks, tiny_model(**arguments, vocab_parallel=True))
    assert len(plain.losses) == 5
    assert split.losses == pytest.approx(plain.losses, rel=bound)
    assert split.grad_norms == pytest.approx(plain.grad_norms, rel=100 * bound)
