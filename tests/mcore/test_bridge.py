"""Test `megatron_vp.enable` in Megatron-Bridge's loop: losses and gradients as in plain Bridge, hooks, refusals.

It runs on CPU ranks, with the stand-ins of `bridge_loop`. Without Megatron-Bridge, the tests are skipped.
"""

from functools import cache

import numpy as np
import pytest

from tests.harness.ranks import RankError, run_ranks
from tests.mcore import bridge_loop

BOUND = 1e-6
pytestmark = pytest.mark.skipif(bridge_loop.missing() is not None, reason=str(bridge_loop.missing()))

VOCAB_2 = {"vocab_parallel": True}
V_HALF = {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-1", "pipeline_schedule": "v-half"}


def doubled(chunks):
    """A hook on finished chunks, as those that load Hugging Face's weights: it needs Megatron's whole layers."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

    for chunk in chunks:
        if chunk.pre_process:
            assert type(chunk.embedding.word_embeddings) is VocabParallelEmbedding
            chunk.embedding.word_embeddings.weight.data *= 2
        if chunk.post_process:  # of tied weights, plain Megatron's last stage has a copy
            assert isinstance(chunk.output_layer, ColumnParallelLinear)
            tied = chunk.share_embeddings_and_output_weights
            assert tied or chunk.output_layer.weight.std() > 0  # a hook before this one may have loaded it
            chunk.output_layer.weight.data *= 2
    return chunks


def start(settings):
    """Put the plug-in under Bridge, or without settings what a plain run needs on a CPU; then import Bridge."""
    import megatron_vp
    from megatron_vp.mcore import patch_table, patches

    if settings is None:
        for group in ("wheel", "cpu platform", "no transformer engine"):
            patches.apply(patch_table.patches_of(group))
    else:
        megatron_vp.enable(**settings)
    bridge_loop.import_bridge()


def train(_rank, _ranks, settings, kind, chunks, tied, tensor=1):
    from megatron.core.utils import unwrap_model

    start(settings)
    config = bridge_loop.configuration(kind, 2, chunks, tied)
    config.model.tensor_model_parallel_size = tensor
    config.model.cross_entropy_fusion_impl = "te"  # of recipes; without their cross_entropy_loss_fusion unread
    config.model.pre_wrap_hooks.append(doubled) if kind == "config" else config.model.register_pre_wrap_hook(doubled)
    trained = bridge_loop.pretrain(config)
    if settings is not None and "vocab_parallel" in settings:
        first = unwrap_model(trained.model)[0]
        assert type(first.embedding.word_embeddings).__name__ == "ShardedWordEmbedding"
    return trained.losses, trained.evaluated, trained.gradients


def merged(ranks):
    whole, losses, evaluated = {}, [], []
    for of_training, of_evaluation, found in ranks:
        losses, evaluated = losses + of_training, evaluated + of_evaluation
        for name, value in found.items():
            cut = value.shape[0] < bridge_loop.VOCAB and ("word_embeddings" in name or "output_layer" in name)
            whole[name] = np.concatenate([whole[name], value]) if cut and name in whole else value
    return losses, evaluated, whole


@cache
def plain(kind, tied):
    return merged(run_ranks(2, train, None, kind, 1, tied))


@pytest.mark.parametrize(
    ("settings", "kind", "chunks", "tied"),
    [
        (VOCAB_2, "provider", 1, False),
        (VOCAB_2, "config", 1, True),
        (V_HALF, "provider", 2, True),
        (V_HALF, "config", 2, False),
        (VOCAB_2, "gemma", 1, True),  # scales its embedding, caps its logits
        (V_HALF, "gemma", 2, True),
        ({"pipeline_schedule": "zb-v"}, "gemma", 2, False),
    ],
)
def test_bridge_trains_as_without_the_plug_in(settings, kind, chunks, tied):
    plain_losses, plain_evaluated, plain_gradients = plain(kind, tied)
    losses, evaluated, gradients = merged(run_ranks(2, train, settings, kind, chunks, tied))
    expected = dict(plain_gradients)
    if tied:  # plain Megatron's last stage holds a copy, of which the gradient is added to the embedding's
        expected.pop("output_layer.weight", None)
    assert len(losses) == 3 and len(evaluated) == 3 and gradients.keys() == expected.keys()
    np.testing.assert_allclose(losses + evaluated, plain_losses + plain_evaluated, rtol=BOUND)
    for name, value in expected.items():
        assert np.linalg.norm(gradients[name] - value) <= BOUND * np.linalg.norm(value), name


@pytest.mark.parametrize(("settings", "chunks"), [(VOCAB_2, 1), (V_HALF, 2)])
def test_weights_of_hugging_face_are_loaded_before_the_layers_are_cut(tmp_path, settings, chunks):
    bridge_loop.save_hugging_face(tmp_path)
    plain_losses, _, plain_gradients = merged(run_ranks(2, train, None, str(tmp_path), 1, False))
    losses, _, gradients = merged(run_ranks(2, train, settings, str(tmp_path), chunks, False))
    assert len(losses) == 3 and gradients.keys() == plain_gradients.keys()
    np.testing.assert_allclose(losses, plain_losses, rtol=BOUND)
    for name, value in plain_gradients.items():
        assert np.linalg.norm(gradients[name] - value) <= BOUND * np.linalg.norm(value), name


@pytest.mark.parametrize("tensor", [1, 2])
def test_losses_on_two_replicas_or_two_tensor_ranks_are_those_of_bridge(tensor):
    """Gradients are not compared: each rank holds those of its part of the distributed optimizer, or of its rows."""
    call = 4, train
    expected, ours = (merged(run_ranks(*call, each, "provider", 1, True, tensor)) for each in (None, VOCAB_2))
    assert len(ours[0]) == 6  # two ranks report
    np.testing.assert_allclose(ours[0] + ours[1], expected[0] + expected[1], rtol=BOUND)


def train_on_packs(_rank, _ranks, settings, chunks, folder, padded):
    from megatron_vp.mcore import patch_table, patches

    start(settings)
    patches.apply(patch_table.patches_of("flash attention"))  # Megatron's local attention takes no packs
    config = bridge_loop.configuration("provider", 2, chunks)
    bridge_loop.read_packs(config, folder, padded)
    trained = bridge_loop.pretrain(config)
    return trained.losses, trained.evaluated, trained.gradients


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    bridge_loop.save_packs(folder)
    return folder


@pytest.mark.parametrize(("settings", "chunks", "padded"), [(VOCAB_2, 1, False), (V_HALF, 2, True)])
def test_packs_train_as_without_the_plug_in(packs, settings, chunks, padded):
    plain_losses, plain_evaluated, plain_gradients = merged(run_ranks(2, train_on_packs, None, 1, packs, padded))
    losses, evaluated, gradients = merged(run_ranks(2, train_on_packs, settings, chunks, packs, padded))
    assert len(losses) == 3 and gradients.keys() == plain_gradients.keys()
    np.testing.assert_allclose(losses + evaluated, plain_losses + plain_evaluated, rtol=BOUND)
    for name, value in plain_gradients.items():
        assert np.linalg.norm(gradients[name] - value) <= BOUND * np.linalg.norm(value), name


def refused(_rank, ranks, settings, chunks, changes):
    start(settings)
    config = bridge_loop.configuration("provider", ranks, chunks)
    for name, value in changes.items():
        setattr(config.model, name, value)
    bridge_loop.pretrain(config)


@pytest.mark.parametrize(
    ("settings", "chunks", "changes", "said"),
    [
        (V_HALF, 1, {}, "v-half has 2 chunks per rank, but this script's process groups have 1"),
        (VOCAB_2, 1, {"pipeline_model_parallel_layout": "Ettt|tL"}, "remove it"),
        (VOCAB_2, 1, {"final_logit_softcapping": 30.0}, "but the model's output layer does not apply it"),
        (VOCAB_2 | {"vocab_label_smoothing": 0.1}, 1, {"final_logit_softcapping": 30.0}, "leave the option out"),
        (V_HALF, 2, {"account_for_loss_in_pipeline_split": True, "num_layers": 7}, "--account-for-loss-in-pipeline"),
    ],
)
def test_what_bridges_configuration_asks_for_in_vain_is_refused(settings, chunks, changes, said):
    with pytest.raises(RankError, match=said):
        run_ranks(2, refused, settings, chunks, changes)


def go_on(_rank, ranks, settings, chunks, iterations, folder, fully_reshardable):
    """Losses of the training iterations up to `iterations`, from the checkpoint in `folder` if there is one."""
    start(settings)
    from megatron.bridge.training.config import CheckpointConfig

    places = {"save": folder, "load": folder, "save_interval": 3, "fully_parallel_save": True}
    checkpoint = CheckpointConfig(**places, dist_ckpt_optim_fully_reshardable=fully_reshardable)
    config = bridge_loop.configuration("provider", ranks, chunks, False, iterations, checkpoint, ends=5)
    return bridge_loop.pretrain(config).losses


def losses_of(*call):
    return run_ranks(2, go_on, *call)[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return losses_of(None, 1, 5, str(tmp_path_factory.mktemp("uninterrupted")), False)


@pytest.mark.parametrize(
    ("first", "then", "fully_reshardable"),
    [
        ((None, 1), (VOCAB_2, 1), True),
        ((V_HALF, 2), (None, 1), False),  # Bridge's default, in place of which a run of ours writes another
    ],
)
def test_training_goes_on_with_and_without_the_plug_in(uninterrupted, tmp_path, first, then, fully_reshardable):
    before = losses_of(*first, 3, str(tmp_path), fully_reshardable)
    after = losses_of(*then, 5, str(tmp_path), fully_reshardable)
    assert len(before) == 3 and len(after) == 2
    np.testing.assert_allclose(before + after, uninterrupted, rtol=BOUND)


def test_optimizer_state_that_fits_one_layout_alone_is_refused(tmp_path):
    losses_of(None, 1, 3, str(tmp_path), False)
    with pytest.raises(RankError, match="in this checkpoint has the format dp_reshardable, which can be loaded"):
        losses_of(VOCAB_2, 1, 5, str(tmp_path), False)
