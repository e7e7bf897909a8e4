"""Test Megatron-Bridge's LoRA on attention and MLP in a vocabulary-parallel run: gradients, checkpoints of adapters.

It runs on CPU ranks, with the stand-ins of `bridge_loop`. Without Megatron-Bridge, the tests are skipped.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import pytest

from tests.harness.ranks import RankError, run_ranks
from tests.mcore import bridge_loop
from tests.mcore.test_bridge import BOUND, V_HALF, VOCAB_2, merged, start

pytestmark = pytest.mark.skipif(bridge_loop.missing() is not None, reason=str(bridge_loop.missing()))

LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def lora(targets):
    """Bridge's LoRA, whose adapters begin with values by their place in the model, not by the order of ranks."""
    import torch
    from megatron.bridge.peft.lora import LoRA

    class Placed(LoRA):
        def __call__(self, model, training=True):
            model = super().__call__(model, training)
            for chunk in model:
                for name, weight in bridge_loop.by_place(chunk):
                    if ".adapter." in name:
                        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                        weight.data.normal_(std=0.1, generator=generator)
            return model

    return dataclass(Placed)(target_modules=targets, dim=4, alpha=8, dropout=0.0)


def train(_rank, ranks, settings, chunks, source, folder, iterations, targets=LAYERS):
    start(settings)
    from megatron.bridge.training.config import CheckpointConfig

    places = {"save": folder, "load": folder, "save_interval": 2, "pretrained_checkpoint": source}
    checkpoint = CheckpointConfig(**places, dist_ckpt_optim_fully_reshardable=True)
    config = bridge_loop.configuration(source, ranks, chunks, False, iterations, checkpoint, ends=4)
    config.peft = lora(targets)
    trained = bridge_loop.pretrain(config)
    return trained.losses, trained.evaluated, trained.gradients


@pytest.mark.parametrize(("settings", "chunks"), [(VOCAB_2, 1), (V_HALF, 2)])
def test_adapters_train_as_in_plain_bridge_and_go_on(tmp_path, settings, chunks):
    source, plain, whole, parts = (str(tmp_path / name) for name in ("source", "plain", "whole", "parts"))
    bridge_loop.save_hugging_face(source)
    plain_losses, _, plain_gradients = merged(run_ranks(2, train, None, 1, source, plain, 4))
    losses, _, gradients = merged(run_ranks(2, train, settings, chunks, source, whole, 4))
    assert len(losses) == 4 and gradients.keys() == plain_gradients.keys()
    assert len(gradients) == 2 * len(LAYERS) * bridge_loop.LAYERS  # two weights of each adapter, and nothing else
    np.testing.assert_allclose(losses, plain_losses, rtol=BOUND)
    for name, value in plain_gradients.items():
        assert np.linalg.norm(gradients[name] - value) <= BOUND * np.linalg.norm(value), name
    before = merged(run_ranks(2, train, settings, chunks, source, parts, 2))[0]
    after = merged(run_ranks(2, train, settings, chunks, source, parts, 4))[0]
    assert len(before) == 2 and len(after) == 2
    np.testing.assert_allclose(before + after, losses, rtol=BOUND)


def test_an_adapter_on_the_output_layer_is_refused(tmp_path):
    bridge_loop.save_hugging_face(tmp_path / "source")
    with pytest.raises(RankError, match="would skip an adapter"):
        run_ranks(2, train, VOCAB_2, 1, str(tmp_path / "source"), str(tmp_path), 1, ["output_layer"])
