"""Test predictions: they follow the schedule, agree with published values, and are refused for unsupported jobs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evidence.calibration import known_cells
from megatron_vp.cost.hardware.constants import CALIBRATED
from megatron_vp.cost.hardware.gpus import HARDWARE, find_hardware
from megatron_vp.cost.layers.layouts import redistributed_layers
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.paper.published import Cell
from megatron_vp.cost.paper.runs import predict_cell
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.planning.stage_costs import _pace, expected_maximum
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod

H100 = HARDWARE["h100"]


def job(**changes):
    model = ModelShape(layers=16, hidden=2048, heads=16, ffn=8192, vocab=128000)
    return Job(model, **{"sequence": 2048, "micro_batch": 1, "microbatches": 16, "pipeline": 4} | changes)


def test_vocabulary_parallelism_balances_time_and_memory():
    plain, split = (predict(job(), Plan(vocab=vocab), H100) for vocab in (VocabMethod.NONE, VocabMethod.VOCAB_2))
    assert split.iteration_seconds < 0.75 * plain.iteration_seconds
    assert max(plain.timeline.busy) > 1.7 * min(plain.timeline.busy)
    assert max(split.timeline.busy) < 1.1 * min(split.timeline.busy)
    parameters = [[rank.parameters for rank in found.memory] for found in (plain, split)]
    assert max(parameters[0]) > 1.5 * min(parameters[0]) and len(set(parameters[1])) == 1
    step = PassTimes(job(), H100).optimizer_step(max(parameters[0]) / 2)
    assert plain.iteration_seconds == pytest.approx(plain.timeline.makespan + step)
    assert plain.mfu < split.mfu < 1 and split.tokens_per_second == 16 * 2048 / split.iteration_seconds


def test_redistributed_layers_shorten_the_plain_run():
    layers = redistributed_layers(job())
    assert predict(job(), Plan(layers=layers), H100).iteration_seconds < predict(job(), Plan(), H100).iteration_seconds
    with pytest.raises(UserError, match="does not match 16 layers"):
        predict(job(), Plan(layers=(4, 4, 4, 5)), H100)


def test_experts_have_fewer_replicas_to_share_their_optimizer_with():
    model = ModelShape(layers=16, hidden=2048, heads=16, ffn=8192, vocab=128000, experts=8, experts_per_token=2)
    sizes = {"model": model, "data": 8, "distributed_optimizer": True}
    spread, whole = (predict(replace(job(), **sizes, expert=expert), Plan(), H100) for expert in (8, 1))
    # An eighth of the experts, whole, or all of them, shared by eight: as much optimizer state, fewer parameters.
    assert spread.memory[1].optimizer == pytest.approx(whole.memory[1].optimizer, rel=1e-6)
    assert spread.memory[1].parameters < 0.3 * whole.memory[1].parameters
    # What the replicas sum of the dense layers alone: the whole run sums the experts too.
    after = [found.iteration_seconds - found.timeline.makespan for found in (spread, whole)]
    assert after[0] < 0.5 * after[1]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(5, 8, 2048, "baseline", 256),
        Cell(5, 8, 4096, "redis", 64),
        Cell(5, 8, 4096, "vocab-1", 32),
        Cell(5, 8, 2048, "vocab-2", 128),
        Cell(5, 16, 4096, "interlaced", 256),
        Cell(6, 16, 2048, "baseline", 128),
    ],
)
def test_published_cells_come_out(cell):
    found, published = predict_cell(cell), known_cells()[cell]
    assert found.mfu == pytest.approx(published.mfu, rel=0.05)
    assert found.memory == pytest.approx(published.memory, rel=0.015)


SPREAD = CALIBRATED.speed_spread

WORK = st.lists(st.floats(0.5, 1.2), min_size=2, max_size=16)


def slowest(work, each):
    """Seconds per microbatch of the slowest rank, with `each` GPUs on every rank."""
    pace = _pace(work, each * len(work), CALIBRATED)
    return max(own * factor for own, factor in zip(work, pace, strict=True))


@pytest.mark.parametrize("work", [(1.0,) * 6, (1.0, 0.99, 1.02, 1.01), (0.9, 1.0, 1.4), (0.0, 1.0, 0.98)])
@pytest.mark.parametrize("each", [1, 4, 32])
def test_the_last_gpu_takes_as_long_as_drawn_gpus_take_on_average(work, each):
    drawn = 1 + SPREAD * np.random.default_rng(1).standard_normal((20_000, len(work), each))
    mean = (np.array(work)[:, None] * drawn).max((1, 2)).mean()
    assert expected_maximum(work, each, SPREAD) == pytest.approx(mean, rel=5e-4)


@given(WORK, st.data(), st.sampled_from([1, 8, 1024]))
def test_less_work_on_any_rank_never_takes_longer(work, data, each):
    less = list(work)
    less[data.draw(st.integers(0, len(work) - 1))] *= data.draw(st.floats(0.5, 1))
    assert slowest(less, each) <= slowest(work, each) * (1 + 1e-7)


H100 = find_hardware("h100")
TWO = VocabMethod.VOCAB_2
MODEL = ModelShape(layers=8, hidden=2048, heads=16, ffn=8192, vocab=131072)
JOB = Job(MODEL, sequence=2048, micro_batch=1, microbatches=8, pipeline=4)
ALIKE = H100.alike
"""All ranks are equally fast, however busy they are."""
ROWS = (65536, 40960, 24576, 0)


def assigned(rows=ROWS, **changes):
    return predict(replace(JOB, **changes), Plan(vocab=TWO, vocab_rows=rows), ALIKE)


def test_even_rows_cost_what_even_shards_cost():
    even = predict(JOB, Plan(vocab=TWO), ALIKE)
    same = assigned((32768,) * 4)
    for kind, values in even.timeline.costs.named().items():
        assert same.timeline.costs.named()[kind] == pytest.approx(values)
    assert [rank.parts() for rank in same.memory] == [rank.parts() for rank in even.memory]


def test_memory_follows_the_rows():
    found, even = assigned().memory, predict(JOB, Plan(vocab=TWO), H100).memory
    rows = 2 * 2048  # both layers, bytes per parameter below
    for rank in range(4):
        more = ROWS[rank] - 32768
        assert found[rank].parameters - even[rank].parameters == 2 * rows * more
        assert found[rank].gradients - even[rank].gradients == 4 * rows * more
        assert found[rank].optimizer - even[rank].optimizer == 12 * rows * more
    assert found[0].vocabulary - even[0].vocabulary == 6 * 2048 * 32768
    assert assigned((65536, 65536, 0, 0)).memory[2].vocabulary == 0  # not a member of any collective
    assert found[3].vocabulary > 0  # the last stage has X and its gradient
