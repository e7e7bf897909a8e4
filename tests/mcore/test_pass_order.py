"""Training orders its passes for the same costs as `plan` and `simulate` do."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_vp.cost.balance.chosen_shards import with_shards
from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.prediction.predict import make_simulator
from megatron_vp.cost.sizes.job_plan import plan_of
from megatron_vp.cost.sizes.job_sizes import job_of
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.mcore.start.preflight import check_job
from megatron_vp.schedule import PassCosts, StageCosts, VocabMethod
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
    job, plan = job_of(config.values), plan_of(config)
    plan = with_shards(config, plan, job, HARDWARE["cpu"])
    with mock.patch("megatron_vp.cost.prediction.predict._simulator") as made:
        make_simulator(job, plan, HARDWARE["cpu"])
    return settled.order, made.call_args.args[0].costs


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
    ],
)
def test_layouts_patterns_and_given_rows_are_those_of_the_run(changes):
    found, simulated = ordered_for(**SEVEN | {"vocab_parallel": True} | changes)
    assert isinstance(found, StageCosts) and found == simulated


def test_flops_stand_in_where_the_cost_model_does_not_know_the_job():
    assert ordered_for(**SIXTEEN, vocab_parallel=True)[0] is not None
    job = SIXTEEN | {"vocab_parallel": True, "mtp_num_layers": 1, "position_embedding_type": "rope"}
    assert check_job(["--cpu", *tiny_model(**job)], 4).order is None, "nothing is left of another job"


def order_of(rank, _world_size, words):
    """The costs that one rank of a job orders for. Each rank takes its device for another kind."""
    import sys

    import pretrain_gpt_vp as script
    from megatron_vp.mcore.options import predicted_job
    from megatron_vp.mcore.training import forward_backward

    seen = []
    original = forward_backward.programs
    hardware = [HARDWARE["cpu"], HARDWARE["b200"]][rank]
    sys.argv = ["pretrain_gpt_vp.py", *words]
    script.prepare()

    def programs(request, **more):
        seen.append(request.costs)
        return original(request, **more)

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
    sizes = job_of(config.values), plan_of(config)
    assert sizes[1].vocab is VocabMethod.VOCAB_2
    with mock.patch("megatron_vp.cost.prediction.predict._simulator") as made:
        for kind in ("cpu", "b200"):
            make_simulator(*sizes, HARDWARE[kind])
    expected, other = (call.args[0].costs for call in made.call_args_list)
    assert expected != other
    assert run_ranks(2, order_of, job) == [expected, expected]
