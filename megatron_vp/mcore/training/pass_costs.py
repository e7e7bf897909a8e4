"""Relative pass costs of a job, from its arguments: what the order of the passes is decided by.

Multiplications and additions alone: a schedule needs proportions, not seconds. Sources: the paper's section 3
for S and T (2nhV/p a GEMM), Megatron's own FLOP count for a transformer layer, attention counted in full.
"""

from __future__ import annotations

import argparse

from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.passes import VocabMethod

LOOK_UP = 0.01
"""Embedding passes move memory and multiply nothing; a small part of a forward keeps them in sight."""

_RECURRENT_EXPANSION = 2
"""Inner width of a Mamba layer by its hidden size: two such projections in, one out."""


def pass_costs(args: argparse.Namespace, method: VocabMethod) -> PassCosts:
    """Costs in units of a rank's forward of one microbatch.

    Args:
        args: Megatron's validated arguments.
        method: vocab-1 or vocab-2; costs S and T are not used without vocabulary passes.
    """
    hidden, ranks = args.hidden_size, args.pipeline_model_parallel_size
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = groups * args.kv_channels
    attention_layers, mlp_layers, recurrent_layers = _layers(args)
    # Per token of a rank: the weights' products, and those of attention, which has no weights.
    projections = (
        attention_layers * 2 * hidden * (2 * queries + 2 * keys)
        + mlp_layers * 2 * hidden * args.ffn_hidden_size * (3 if args.swiglu else 2)
        + recurrent_layers * 2 * hidden * (_RECURRENT_EXPANSION * 3 * hidden)
    ) / ranks
    attention = attention_layers * 4 * args.seq_length * queries / ranks
    forward = projections + attention
    gemm = 2 * hidden * args.padded_vocab_size * (1 + (args.mtp_num_layers or 0)) / ranks
    early = 2 if method is VocabMethod.VOCAB_2 else 1
    return PassCosts(
        F=1.0,
        B=(projections + 2 * attention) / forward,
        W=projections / forward,
        S=early * gemm / forward,
        T=(3 - early) * gemm / forward,
        IF=LOOK_UP,
        IB=LOOK_UP,
    )


def _layers(args: argparse.Namespace) -> tuple[int, int, int]:
    """How many layers hold attention, an MLP, a recurrence; a hybrid model's layer holds one of them."""
    if args.hybrid_layer_pattern is None:
        return args.num_layers, args.num_layers, 0
    pattern = args.hybrid_layer_pattern.partition("/")[0]
    return tuple(sum(map(pattern.count, symbols)) for symbols in ("*D+", "-E", "MG"))
