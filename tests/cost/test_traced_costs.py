"""Test that the recorded pass times of a run can be simulated for the same job."""

import json

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.planning.own_plan import traced_costs
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.planning.stage_costs import order_costs
from megatron_vp.errors import UserError
from megatron_vp.schedule import PassCosts, Simulator, VocabMethod, generate, simulate
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.trace.rank_files import RankTrace, TracedSpan, path_of

COSTS = PassCosts(F=30, B=60, W=0, S=5, T=5, IF=0.5, IB=0.5)
PLAN = Plan(vocab=VocabMethod.VOCAB_2)
FLAGS = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 1000 --global-batch-size 9 "
    "--untie-embeddings-and-output-weights --pipeline-model-parallel-size 3 --vocab-parallel --micro-batch-size 1"
)


def job(microbatches, pipeline=3):
    model = ModelShape(layers=6, hidden=64, heads=2, ffn=256, vocab=1000)
    return Job(model, sequence=32, micro_batch=1, microbatches=microbatches, pipeline=pipeline)


@pytest.fixture
def folder(tmp_path):
    """The trace, in milliseconds, of a run of `PLAN` with four microbatches."""
    timeline = simulate(generate("1f1b", 3, 4, vocab="vocab-2", costs=COSTS), COSTS)
    schedule = timeline.schedule
    for rank, order in enumerate(schedule.ranks):
        spans = tuple(
            TracedSpan(1, Lane.COMPUTE, str(step), step.kind.value, *span)
            for step, span in zip(order, timeline.spans[rank], strict=True)
        )
        trace = RankTrace("7", rank, "1f1b", "vocab-2", schedule.placement.stage_of, {1: 4}, 0.0, spans)
        path_of(tmp_path, rank).write_text(trace.to_json())
    return tmp_path


def expected(hardware):
    """The order that training has on this hardware, with the traced times."""
    order = order_costs(job(9), PLAN, HARDWARE[hardware])
    return Simulator(generate("1f1b", 3, 9, vocab="vocab-2", costs=order), order).simulate(COSTS)


def test_the_run_s_pass_times_are_played_in_seconds(folder):
    costs = traced_costs(folder, job(9), PLAN)
    assert pytest.approx((0.03,) * 3) == costs.F and pytest.approx((0.005,) * 3) == costs.S
    found = predict(job(9), PLAN, HARDWARE["cpu"], measured=costs)
    assert found.timeline.makespan == pytest.approx(expected("cpu").makespan / 1000)


def test_the_command_takes_them(folder, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text("precision:\n  bf16: true\n")
    arguments = ["simulate", str(config), *FLAGS.split(), "--format", "json"]
    modelled, traced = (CliRunner().invoke(app, [*arguments, *extra]) for extra in ([], ["--trace", str(folder)]))
    assert modelled.exit_code == traced.exit_code == 0, traced.output
    assert modelled.output != traced.output
    found = json.loads(traced.output)["plan"]
    assert found["busy_seconds"] == pytest.approx([busy / 1000 for busy in expected("h100").busy])
    assert found["iteration_seconds"] - found["seconds"]["step"] == pytest.approx(expected("h100").makespan / 1000)


@pytest.mark.parametrize(
    ("pipeline", "plan"), [(6, PLAN), (3, Plan(vocab=VocabMethod.VOCAB_1)), (3, Plan("zb-h1", VocabMethod.VOCAB_2))]
)
def test_the_trace_of_another_run_is_refused(folder, pipeline, plan):
    with pytest.raises(UserError, match="simulate the job that was traced"):
        traced_costs(folder, job(4, pipeline), plan)
