"""Test Megatron-Bridge's losses against six digits that plain Bridge 0.6.2 once printed on CPU.

The plug-in must give the same digits with either way to build a model, tied or untied, before and after a checkpoint.
Without Megatron-Bridge, the tests are skipped.
"""

import pytest

from tests.harness.ranks import run_ranks
from tests.mcore import bridge_loop
from tests.mcore.test_bridge import V_HALF, VOCAB_2, start

pytestmark = pytest.mark.skipif(bridge_loop.missing() is not None, reason=str(bridge_loop.missing()))

HALF_A_DIGIT = 1e-6
"""A loss that lies between two printed ones may be printed as either of them."""
UNTIED = [5.547856, 5.483542, 5.445114]
TIED = [5.555079, 5.516653, 5.482200]
EVALUATED_TIED = 5.432811, 5.444854
"""The first validation and the test."""
GOES_ON = [5.388822, 5.341393]
"""Iterations 4 and 5 after `UNTIED`."""
ZB_H1 = VOCAB_2 | {"pipeline_schedule": "zb-h1"}


def train(_rank, ranks, settings, kind, chunks, tied, iterations, folder):
    """Losses of training and evaluation, with two query groups, a constant learning rate and a GPU's initialisation."""
    start(settings)
    from megatron.bridge.training.config import CheckpointConfig

    places = {"save": folder, "load": folder, "save_interval": 3, "dist_ckpt_optim_fully_reshardable": True}
    checkpoint = CheckpointConfig(**places) if folder else None
    config = bridge_loop.configuration(kind, ranks, chunks, tied, iterations, checkpoint, ends=5)
    transformer = config.model.transformer if kind == "config" else config.model
    transformer.num_query_groups, transformer.use_cpu_initialization = 2, False
    config.optimizer.lr = config.optimizer.min_lr = 1e-3
    config.optimizer.weight_decay = config.scheduler.start_weight_decay = config.scheduler.end_weight_decay = 0.01
    trained = bridge_loop.pretrain(config)
    return trained.losses, trained.evaluated


def losses(settings, kind, chunks=1, tied=False, iterations=3, folder=None):
    return run_ranks(2, train, settings, kind, chunks, tied, iterations, folder)[1]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "kind", "chunks", "tied"),
    [
        (VOCAB_2, "config", 1, False),
        pytest.param(None, "config", 1, False, marks=slow),
        pytest.param(None, "provider", 1, False, marks=slow),
        pytest.param(VOCAB_2, "provider", 1, False, marks=slow),
        pytest.param(V_HALF, "config", 2, False, marks=slow),
        pytest.param(None, "config", 1, True, marks=slow),
        pytest.param(ZB_H1, "config", 1, True, marks=slow),
    ],
)
def test_losses_are_those_of_plain_bridge(settings, kind, chunks, tied):
    trained, evaluated = losses(settings, kind, chunks, tied)
    assert trained == pytest.approx(TIED if tied else UNTIED, abs=HALF_A_DIGIT)
    if tied:
        assert (evaluated[0], evaluated[-1]) == pytest.approx(EVALUATED_TIED, abs=HALF_A_DIGIT)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(None, VOCAB_2), (VOCAB_2, None)])
def test_losses_behind_a_checkpoint_are_those_of_plain_bridge(tmp_path, first, then):
    before, _ = losses(first, "provider", iterations=3, folder=str(tmp_path))
    after, _ = losses(then, "provider", iterations=5, folder=str(tmp_path))
    assert before + after == pytest.approx(UNTIED + GOES_ON, abs=HALF_A_DIGIT)
