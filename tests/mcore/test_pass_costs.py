"""What the order of the passes is decided by: costs of a mean rank, or of every stage and rank where they differ."""

from __future__ import annotations

import argparse

import pytest

from megatron_vp.mcore.training.pass_costs import LOOK_UP, costs_of, pass_costs
from megatron_vp.mcore.training.programs import programs
from megatron_vp.mcore.training.stage_layers import Layers, layers_by_stage
from megatron_vp.schedule import FAMILIES, PassCosts, Placement, ScheduleRequest, StageCosts, VocabMethod
from megatron_vp.vocab.shards import VocabShards

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "group_query_attention": False,
    "ffn_hidden_size": 256,
    "swiglu": False,
    "seq_length": 128,
    "padded_vocab_size": 512,
    "num_layers": 8,
    "hybrid_layer_pattern": None,
    "mtp_num_layers": None,
    "pipeline_model_parallel_size": 4,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
LINEAR, V = Placement.linear(4), Placement.v_shape(4)


def arguments(**changes):
    return argparse.Namespace(**SIZES | changes)


@pytest.mark.parametrize(
    ("changes", "placement", "counts"),
    [
        ({}, LINEAR, [2, 2, 2, 2]),
        ({"num_layers": 16}, Placement.round_robin(4, 2), [2] * 8),
        ({"pipeline_model_parallel_layout": "Et*3|t|tt|ttL"}, LINEAR, [3, 1, 2, 2]),
        ({"pipeline_model_parallel_layout": "E|t|t|t|t|t|t|ttL"}, V, [0, 1, 1, 1, 1, 1, 1, 2]),
        ({"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1}, LINEAR, [3, 2, 2, 1]),
        ({"decoder_last_pipeline_num_layers": 5}, LINEAR, [1, 1, 1, 5]),
        (
            {"decoder_last_pipeline_num_layers": 2, "num_layers": 14},
            Placement.round_robin(4, 2),
            [2, 2, 2, 1, 2, 2, 2, 1],
        ),
        ({"account_for_loss_in_pipeline_split": True, "num_layers": 7}, LINEAR, [2, 2, 2, 1]),
        (
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
            | {"num_layers": 6},
            LINEAR,
            [1, 2, 2, 1],
        ),
        ({"mtp_num_layers": 1}, LINEAR, [2, 2, 2, 3]),
    ],
)
def test_layers_are_counted_by_stage(changes, placement, counts):
    assert layers_by_stage(arguments(**changes), placement) == [Layers(count, count, 0) for count in counts]


def test_a_pattern_is_counted_by_its_segments():
    cut = arguments(hybrid_layer_pattern="*-|M|-*-|/*-", mtp_num_layers=1)
    assert layers_by_stage(cut, LINEAR) == [(1, 1, 0), (0, 0, 1), (1, 2, 0), (1, 1, 0)]
    whole = arguments(hybrid_layer_pattern="*-M-*-M-")
    assert layers_by_stage(whole, LINEAR) == [(1, 1, 0), (0, 1, 1)] * 2


@pytest.mark.parametrize("method", [VocabMethod.VOCAB_1, VocabMethod.VOCAB_2])
@pytest.mark.parametrize(("vocab", "heads"), [(512, None), (500, None), (512, 2)])
def test_equal_layers_and_even_shards_keep_the_costs_of_a_mean_rank(method, vocab, heads):
    args = arguments(padded_vocab_size=vocab, mtp_num_layers=heads)
    shards = VocabShards(vocab, 4)
    assert costs_of(args, method, LINEAR, shards) == pass_costs(args, method)
    assert costs_of(args, VocabMethod.NONE, LINEAR, None) == pass_costs(args, VocabMethod.NONE)


def test_assigned_rows_cost_what_they_multiply():
    args, shards = arguments(), VocabShards(512, 8, 2, (0, 256, 64, 192))
    mean, assigned = (costs_of(args, VocabMethod.VOCAB_2, LINEAR, cut) for cut in (VocabShards(512, 8, 2), shards))
    assert isinstance(mean, PassCosts) and isinstance(assigned, StageCosts)
    for found, each in ((assigned.S, mean.S), (assigned.T, mean.T)):
        assert found == pytest.approx([each * rows / 128 for rows in shards.stage_rows])
    assert assigned.IF == assigned.IB == (0, LOOK_UP, LOOK_UP, LOOK_UP)
    assert assigned.F == (1, 1, 1, 1)
    nominal = assigned.nominal(4).named()
    assert nominal == pytest.approx(mean.named() | {"IF": 0.75 * LOOK_UP, "IB": 0.75 * LOOK_UP})


def test_unequal_layers_cost_what_they_are():
    args = arguments(pipeline_model_parallel_layout="Ettt|tttt|t|L")
    costs = costs_of(args, VocabMethod.VOCAB_1, LINEAR, VocabShards(512, 4))
    assert costs.F == (1.5, 2, 0.5, LOOK_UP) and len(set(costs.S)) == 1
    whole = costs_of(args, VocabMethod.NONE, LINEAR, None)
    assert whole.F == costs.F and whole.S == ()
    interlaced = costs_of(args, VocabMethod.VOCAB_2, LINEAR, VocabShards(512, 4), interlaced=True)
    together = [s + t + 2 * LOOK_UP for s, t in zip(costs.S, costs.T, strict=True)]
    found = interlaced.V
    assert interlaced.S == () and found == pytest.approx(together)


@pytest.mark.parametrize("name", ["1f1b", "interlaced", "zb-h1"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_programs_are_made_for_costs_by_rank(name, forward_only):
    args = arguments(pipeline_model_parallel_layout="Ettt|tttt|t|L")
    interlaced = name == "interlaced"
    shards = VocabShards(512, 4, stage_rows=None if interlaced else (0, 0, 300, 212))
    costs = costs_of(args, VocabMethod.VOCAB_2, LINEAR, shards, interlaced)
    family = FAMILIES[name]
    request = ScheduleRequest.of(
        family,
        4,
        6,
        method=family.method(VocabMethod.VOCAB_2),
        costs=costs,
        vocab_ranks=shards.holders,
        forward_only=forward_only,
    )
    schedule, lowered = programs(request, False)
    assert programs(request, False)[1] is lowered, "made once"
    assert schedule.vocab_ranks == shards.holders
    assert lowered[0].vocab_members == ((0, 1, 2, 3) if interlaced else (0, 2, 3))
