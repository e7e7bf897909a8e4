"""Test that training orders its passes by the same costs as `plan` and `simulate`."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.job_plan import plan_of
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.planning.own_plan import with_shards
from megatron_vp.cost.planning.predict import make_simulator
from megatron_vp.cost.planning.stage_costs import order_costs
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.jobs.virtual_stages import SHIFTS, shifted_layers
from megatron_vp.mcore.options import predicted_job
from megatron_vp.mcore.start.preflight import check_job
from megatron_vp.schedule import FAMILIES, PassCosts, StageCosts, VocabMethod, generate
from tests.harness.ranks import run_ranks
from tests.harness.training import tiny_model

SEVEN = {
    "num_layers": 7,
    "hidden_size": 256,
    "vocab_size": 16383,
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 16,
    "vocab_shards": "balanced",
}
"""Seven layers on four ranks and a vocabulary that weighs as much as some of them."""
SIXTEEN = SEVEN | {"num_layers": 16, "vocab_shards": "even"}
HYBRID = {
    "num_layers": None,
    "hybrid_layer_pattern": "*-*-*-*-*-*-*-",
    "spec": ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"],
    "position_embedding_type": "rope",
}


def ordered_for(**changes):
    """What a start of a job orders for, and what `simulate` orders the same words for."""
    words = tiny_model(**changes)
    settled = check_job(["--cpu", *words], 4)
    config = read_job_config([], words)
    job, plan = job_of(config), plan_of(config)
    plan = with_shards(config, plan, job, HARDWARE["cpu"])
    return settled.order, order_costs(job, plan, HARDWARE["cpu"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_with_assigned_layers_and_rows_every_stage_and_rank_counts(schedule, method):
    found, simulated = ordered_for(
        **SEVEN, vocab_parallel=True, vocab_parallel_algorithm=method, pipeline_schedule=schedule
    )
    assert isinstance(found, StageCosts) and found == simulated


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_parallel": True},
        {"vocab_parallel": True, "pipeline_schedule": "v-half"},
        {"vocab_parallel": True, "pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
        {"vocab_parallel": True, "pipeline_schedule": "interlaced"},
        {"pipeline_schedule": "zb-h1", "vocab_shards": None},
        {"pipeline_schedule": "v-min", "vocab_shards": None, "untie_embeddings_and_output_weights": True},
    ],
)
def test_with_equal_layers_and_rows_a_mean_rank_counts(changes):
    found, simulated = ordered_for(**SIXTEEN | changes)
    assert isinstance(found, PassCosts) and found == simulated


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_model_parallel_layout": "Et|tt|tt|ttL"},
        {"pipeline_model_parallel_layout": "Et|tt|tt|ttL", "vocab_shards": "even"},
        {"vocab_shards": "8192,0,0,8192", "pipeline_model_parallel_layout": "Et|tt|tt|ttL"},
        HYBRID,
        HYBRID | {"pipeline_schedule": "v-half"},
        HYBRID | {"hybrid_layer_pattern": "*-*|-*-*|-*-*|-*-", "vocab_shards": "even"},
        {"account_for_loss_in_pipeline_split": True},
        {"decoder_first_pipeline_num_layers": 1, "num_virtual_stages_per_pipeline_rank": 1},
    ],
)
def test_layouts_patterns_and_given_rows_are_those_of_the_run(changes):
    found, simulated = ordered_for(**SEVEN | {"vocab_parallel": True} | changes)
    assert isinstance(found, StageCosts) and found == simulated


OFFLOADED = SIXTEEN | {"hidden_size": 512, "num_attention_heads": 8, "seq_length": 512, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if method is family.methods[-1] else pytest.mark.slow)
        for turn, (name, family) in enumerate(FAMILIES.items())
        for method in dict.fromkeys((family.methods[-1], family.methods[(-1, 0, -1, -2)[turn % 4]]))
    ],
)
def test_offloading_that_is_asked_for_is_done_by_training_simulate_and_schedule(name, method):
    split = {"vocab_parallel": True} if method is not VocabMethod.NONE else {"vocab_shards": None}
    if method.is_sharded:
        split["vocab_parallel_algorithm"] = method
    if FAMILIES[name].chunks is None:
        split["num_virtual_stages_per_pipeline_rank"] = 2
    words = tiny_model(**OFFLOADED | split, pipeline_schedule=name, offload_chunks="all")
    settled = check_job(["--cpu", *words], 4)
    config = read_job_config([], settled.words.all)
    count = settled.settings.offload_chunks(settled.placement.chunks)
    sizes = {"vocab": method, "chunks": settled.placement.chunks, "costs": settled.order, "offload_chunks": count}
    trained = generate(name, 4, 8, **sizes)
    simulated = make_simulator(job_of(config), plan_of(config), HARDWARE["cpu"]).schedule
    assert simulated == trained and len(trained.offloaded) >= 4 * count // 2


FIRST, LAST, *ACCOUNTED = SHIFTS


@pytest.mark.parametrize(
    ("layers", "chunks", "options"),
    [
        (8, 1, {FIRST: 3, LAST: 1}),
        (8, 1, {LAST: 5}),
        (14, 2, {LAST: 2}),
        (7, 1, {ACCOUNTED[1]: True}),
        (6, 1, dict.fromkeys(ACCOUNTED, True)),
        (14, 2, dict.fromkeys(ACCOUNTED, True)),
        (15, 2, {ACCOUNTED[0]: True}),
    ],
)
def test_layers_of_the_ends_are_those_of_megatron(layers, chunks, options):
    asked = {"num_layers": layers, "pipeline_model_parallel_size": 4, **options}
    asked |= {"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=options.get(FIRST),
        num_layers_in_last_pipeline_stage=options.get(LAST),
        **{name: options.get(name, False) for name in ACCOUNTED},
    )
    vp_stages = range(chunks) if chunks > 1 else [None]
    theirs = [get_num_layers_to_build(config, vp_stage, rank) for vp_stage in vp_stages for rank in range(4)]
    assert shifted_layers(asked) == tuple(theirs) and sum(theirs) == layers


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ({"num_layers": 8}, None),
        ({"hybrid_layer_pattern": "*-*-*-*", LAST: 1}, (2, 2, 2, 1)),
        ({"num_layers": 8, ACCOUNTED[1]: True}, "8 layers cannot be split over 4 stages with --account-for-loss-in"),
        ({"num_layers": 2, **dict.fromkeys(ACCOUNTED, True)}, (0, 1, 1, 0)),
    ],
)
def test_layers_that_options_shift_add_up(asked, layers):
    refused = pytest.raises(UserError, match=layers) if isinstance(layers, str) else nullcontext()
    with refused:
        assert shifted_layers({"pipeline_model_parallel_size": 4, **asked}) == layers


def test_a_stage_with_fewer_layers_by_options_counts_as_it_is():
    job = SEVEN | {"vocab_parallel": True, "vocab_shards": "even", "account_for_loss_in_pipeline_split": True}
    order = check_job(["--cpu", *tiny_model(**job)], 4).order
    assert isinstance(order, StageCosts) and order.F[3] < order.F[2] == order.F[1]


def order_of(rank, _world_size, words):
    """The costs that one rank of a job orders for. Each rank takes its device for another kind."""
    import sys

    import pretrain_gpt_vp as script
    from megatron_vp.mcore.training import forward_backward

    seen = []
    original = forward_backward.programs
    hardware = [HARDWARE["cpu"], HARDWARE["b200"]][rank]
    sys.argv = ["pretrain_gpt_vp.py", *words]
    script.prepare()

    def programs(request, *more):
        seen.append(request.costs)
        return original(request, *more)

    with (
        mock.patch.object(predicted_job, "_hardware", lambda args: hardware),
        mock.patch.object(forward_backward, "programs", programs),
    ):
        script.main()
    torch.distributed.destroy_process_group()
    return seen[0]


def test_all_ranks_take_the_order_of_rank_0_whatever_their_devices():
    job = tiny_model(
        pipeline_model_parallel_size=2, vocab_parallel=True, vocab_shards="even", pipeline_schedule="zb-h1"
    )
    config = read_job_config([], job)
    sizes = job_of(config), plan_of(config)
    assert sizes[1].vocab is VocabMethod.VOCAB_2
    expected, other = (order_costs(*sizes, HARDWARE[kind]) for kind in ("cpu", "b200"))
    assert expected != other
    assert run_ranks(2, order_of, job) == [expected, expected]
