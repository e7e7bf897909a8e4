"""Relative pass costs of a job, from its arguments: what passes are ordered for where the cost model cannot predict it.

Multiplications and additions alone: a schedule needs proportions, not seconds. Sources: the paper's section 3
for S and T (2nhV/p a GEMM), Megatron's own FLOP count for a transformer layer, attention counted in full.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from megatron_vp.mcore.training.stage_layers import Layers, all_layers, layers_by_stage
from megatron_vp.schedule.costs import Costs, PassCosts, StageCosts
from megatron_vp.schedule.passes import VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.vocab.shards import VocabShards

LOOK_UP = 0.01
"""Embedding passes move memory and multiply nothing; a small part of a forward keeps them in sight. A stage without
layers counts as much."""

_RECURRENT_EXPANSION = 2
"""Inner width of a Mamba layer by its hidden size: two such projections in, one out."""


class _Work(NamedTuple):
    """FLOPs per token: the products with weights, and those of attention, which has no weights."""

    projections: float
    attention: float


def costs_of(
    args: argparse.Namespace,
    method: VocabMethod,
    placement: Placement,
    shards: VocabShards | None,
    interlaced: bool = False,
) -> Costs:
    """Costs in units of a mean rank's forward of one microbatch.

    Equal for all ranks where all stages hold the same layers and the vocabulary is whole or cut evenly; otherwise of
    each stage and rank.

    Args:
        args: Megatron's validated arguments.
        method: vocab-1 or vocab-2; without vocabulary passes it means nothing.
        placement: which virtual stage each chunk of each rank is.
        shards: of the vocabulary; None where its layers are whole.
        interlaced: the vocabulary work of a microbatch is one pass V.
    """
    stages = layers_by_stage(args, placement)
    without_heads = layers_by_stage(argparse.Namespace(**vars(args) | {"mtp_num_layers": 0}), placement)
    assigned = shards is not None and shards.stage_rows is not None
    if not assigned and len(set(without_heads)) == 1:
        return pass_costs(args, method)
    mean = _work(args, all_layers(args))
    unit = sum(mean) / placement.ranks
    work = [_work(args, layers) for layers in stages]
    output: dict[str, tuple[float, ...]] = {}
    if shards is not None:
        ranks = range(placement.ranks)
        rows = [sum(shards.rows(rank * shards.tensor + place) for place in range(shards.tensor)) for rank in ranks]
        s, t = _output_work(args, method)
        holds = [rank in shards.holders for rank in ranks]
        if interlaced:
            output = {"V": tuple((s + t) * each / unit + 2 * LOOK_UP for each in rows)}
        else:
            output = {
                "S": tuple(s * each / unit for each in rows),
                "T": tuple(t * each / unit for each in rows),
                "IF": tuple(LOOK_UP * each for each in holds),
                "IB": tuple(LOOK_UP * each for each in holds),
            }
    return StageCosts(
        F=tuple(max(sum(each) / unit, LOOK_UP) for each in work),
        B=tuple(max((each.projections + 2 * each.attention) / unit, LOOK_UP) for each in work),
        W=tuple(max(each.projections / unit, LOOK_UP) for each in work),
        **output,
    )


def pass_costs(args: argparse.Namespace, method: VocabMethod) -> PassCosts:
    """Means over all ranks.

    Args:
        args: Megatron's validated arguments.
        method: vocab-1 or vocab-2; costs S and T are not used without vocabulary passes.
    """
    ranks = args.pipeline_model_parallel_size
    projections, attention = (each / ranks for each in _work(args, all_layers(args)))
    forward = projections + attention
    s, t = (each * args.padded_vocab_size / ranks for each in _output_work(args, method))
    return PassCosts(
        F=1.0,
        B=(projections + 2 * attention) / forward,
        W=projections / forward,
        S=s / forward,
        T=t / forward,
        IF=LOOK_UP,
        IB=LOOK_UP,
    )


def _work(args: argparse.Namespace, layers: Layers) -> _Work:
    hidden = args.hidden_size
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = groups * args.kv_channels
    projections = (
        layers.attention * 2 * hidden * (2 * queries + 2 * keys)
        + layers.mlp * 2 * hidden * args.ffn_hidden_size * (3 if args.swiglu else 2)
        + layers.recurrent * 2 * hidden * (_RECURRENT_EXPANSION * 3 * hidden)
    )
    return _Work(projections, layers.attention * 4 * args.seq_length * queries)


def _output_work(args: argparse.Namespace, method: VocabMethod) -> tuple[float, float]:
    """FLOPs per token and vocabulary row of S and of T."""
    gemm = 2 * args.hidden_size * (1 + (args.mtp_num_layers or 0))
    early = 2 if method is VocabMethod.VOCAB_2 else 1
    return early * gemm, (3 - early) * gemm
