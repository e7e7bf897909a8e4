"""Test `megatron_vp.enable` in Megatron-Bridge's loop: losses and gradients as in plain Bridge, LoRA, Hugging Face's
weights, one of its recipes, refusals.

It runs on CPU ranks, with the stand-ins of `bridge_loop`. Without Megatron-Bridge, the tests are skipped.
"""

import contextlib
import io
import zlib
from dataclasses import dataclass
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


def assert_as_plain(ours, plain, iterations=3, tied=False):
    """Losses, evaluations and gradients of two merged runs."""
    (losses, evaluated, gradients), (plain_losses, plain_evaluated, expected) = ours, plain
    if tied:  # plain Megatron's last stage holds a copy, of which the gradient is added to the embedding's
        expected = {name: value for name, value in expected.items() if name != "output_layer.weight"}
    assert len(losses) == iterations and evaluated and gradients.keys() == expected.keys()
    np.testing.assert_allclose(losses + evaluated, plain_losses + plain_evaluated, rtol=BOUND)
    for name, value in expected.items():
        assert np.linalg.norm(gradients[name] - value) <= BOUND * np.linalg.norm(value), name


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
    assert_as_plain(merged(run_ranks(2, train, settings, kind, chunks, tied)), plain(kind, tied), tied=tied)


@pytest.mark.parametrize(("settings", "chunks"), [(VOCAB_2, 1), (V_HALF, 2)])
def test_weights_of_hugging_face_are_loaded_before_the_layers_are_cut(tmp_path, settings, chunks):
    bridge_loop.save_hugging_face(tmp_path)
    plain = run_ranks(2, train, None, str(tmp_path), 1, False)
    assert_as_plain(merged(run_ranks(2, train, settings, str(tmp_path), chunks, False)), merged(plain))


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
    plain = run_ranks(2, train_on_packs, None, 1, packs, padded)
    assert_as_plain(merged(run_ranks(2, train_on_packs, settings, chunks, packs, padded)), merged(plain))


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


def train_adapters(_rank, ranks, settings, chunks, source, folder, iterations, targets=LAYERS):
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
    expected = merged(run_ranks(2, train_adapters, None, 1, source, plain, 4))
    found = merged(run_ranks(2, train_adapters, settings, chunks, source, whole, 4))
    assert_as_plain(found, expected, 4)
    assert len(found[2]) == 2 * len(LAYERS) * bridge_loop.LAYERS  # two weights of each adapter, and nothing else
    before = merged(run_ranks(2, train_adapters, settings, chunks, source, parts, 2))[0]
    after = merged(run_ranks(2, train_adapters, settings, chunks, source, parts, 4))[0]
    assert len(before) == 2 and len(after) == 2
    np.testing.assert_allclose(before + after, found[0], rtol=BOUND)


def test_an_adapter_on_the_output_layer_is_refused(tmp_path):
    bridge_loop.save_hugging_face(tmp_path / "source")
    with pytest.raises(RankError, match="would skip an adapter"):
        run_ranks(2, train_adapters, VOCAB_2, 1, str(tmp_path / "source"), str(tmp_path), 1, ["output_layer"])


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


def train_recipe(_rank, ranks, settings, folder, chunks, accounts):
    start(settings)
    config = bridge_loop.recipe(folder, ranks, chunks, accounts)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        trained = bridge_loop.pretrain(config)
    return (trained.losses, trained.evaluated, trained.gradients), said.getvalue()


@pytest.mark.parametrize(
    ("settings", "chunks", "accounts"),
    [(VOCAB_2, 1, True), (V_HALF, 2, False)],  # of a recipe that balances the vocabulary layers by itself, and without
)
def test_a_recipe_trains_as_without_the_plug_in(tmp_path, settings, chunks, accounts):
    bridge_loop.save_hugging_face(tmp_path)
    plain = run_ranks(2, train_recipe, None, str(tmp_path), 1, accounts)
    ours = run_ranks(2, train_recipe, settings, str(tmp_path), chunks, accounts)
    assert_as_plain(*(merged([trained for trained, _ in run]) for run in (ours, plain)))
    named = [line for _, said in ours for line in said.splitlines() if "--account-for-embedding" in line]
    assert len(named) == accounts
