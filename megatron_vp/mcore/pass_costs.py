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


def pass_costs(args: argparse.Namespace, method: VocabMethod) -> PassCosts:
    """Costs in units of a rank's forward of one microbatch.

    Args:
        args: Megatron's validated arguments.
        method: vocab-1 or vocab-2.
    """
    hidden, ranks = args.hidden_size, args.pipeline_model_parallel_size
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = groups * args.kv_channels
    # Per token of one layer: the weights' products, and those of attention, which has no weights.
    projections = 2 * hidden * (2 * queries + 2 * keys) + 2 * hidden * args.ffn_hidden_size * (3 if args.swiglu else 2)
    attention = 4 * args.seq_length * queries
    layers = args.num_layers / ranks
    forward = layers * (projections + attention)
    gemm = 2 * hidden * args.padded_vocab_size / ranks
    early = 2 if method is VocabMethod.VOCAB_2 else 1
    return PassCosts(
        F=1.0,
        B=layers * (projections + 2 * attention) / forward,
        W=layers * projections / forward,
        S=early * gemm / forward,
        T=(3 - early) * gemm / forward,
        IF=LOOK_UP,
        IB=LOOK_UP,
    )
