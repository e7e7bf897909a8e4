"""Test Hugging Face weights in Megatron-Bridge: load them, train five vocabulary-parallel steps, and export them.

It runs on CPU ranks, with the stand-ins of `bridge_loop`. Without Megatron-Bridge, the tests are skipped.
"""

import numpy as np
import pytest

from tests.harness.ranks import run_ranks
from tests.mcore import bridge_loop
from tests.mcore.test_bridge import BOUND, V_HALF, VOCAB_2, start

pytestmark = pytest.mark.skipif(bridge_loop.missing() is not None, reason=str(bridge_loop.missing()))


def freeze(chunks):
    """A hook on finished chunks: the norms are not trained."""
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            weight.requires_grad = "norm" not in name
    return chunks


def round_trip(_rank, ranks, settings, chunks, source, target):
    """Train on what `source` holds, and save in `target` what came out; returns what an export yields on this rank."""
    start(settings)
    from megatron.bridge import AutoBridge

    config = bridge_loop.configuration(source, ranks, chunks, iterations=5)
    # Adam makes steps of this size even of gradients that are rounding errors.
    config.optimizer.lr, config.optimizer.min_lr = 2e-4, 2e-5
    config.model.register_pre_wrap_hook(freeze)
    bridge, exported = AutoBridge.from_hf_pretrained(source), {}

    def save(model):
        bridge.save_hf_pretrained(model, target)
        tasks = bridge.get_conversion_tasks(model)
        exported.update(bridge.export_hf_weights(model, cpu=True, conversion_tasks=tasks))

    trained = bridge_loop.pretrain(config, save)
    return {name: weight.float().numpy() for name, weight in exported.items()}, trained.losses


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return {name: weight.numpy() for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


@pytest.mark.parametrize(
    ("family", "tied", "settings", "chunks"),
    [
        ("Llama", False, VOCAB_2, 1),
        ("Qwen3", False, V_HALF, 2),
        pytest.param("Qwen3", False, VOCAB_2, 1, marks=pytest.mark.slow),
        pytest.param("Llama", True, VOCAB_2, 1, marks=pytest.mark.slow),
        pytest.param("Llama", True, V_HALF, 2, marks=pytest.mark.slow),
    ],
)
def test_weights_come_out_as_through_plain_megatron(tmp_path, family, tied, settings, chunks):
    source, plain, ours = (str(tmp_path / name) for name in ("source", "plain", "ours"))
    bridge_loop.save_hugging_face(source, family, tied)
    (_, (expected, _)) = run_ranks(2, round_trip, None, 1, source, plain)
    (first, _), (second, losses) = run_ranks(2, round_trip, settings, chunks, source, ours)
    assert len(losses) == 5 and expected.keys() == first.keys() == second.keys()
    before, after, saved = loaded(source), loaded(plain), loaded(ours)
    assert before.keys() == after.keys() == saved.keys()
    for name, value in saved.items():
        assert np.linalg.norm(value - after[name]) <= BOUND * np.linalg.norm(after[name]), name
        assert np.array_equal(value, before[name]) == ("norm" in name), name
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        np.testing.assert_array_equal(value, saved[name])
