"""Test whole vocabulary layers for export: plain Megatron's weights on the same ranks, and shards afterwards."""

import numpy as np
import pytest

from tests.harness.ranks import process_group, run_ranks
from tests.mcore import own_loop


def vocabulary_of(model):
    """Of each chunk the names, classes, weights and attributes of its vocabulary layers, and what it says of them."""
    found = []
    for part in model:
        layers = {}
        for name, layer in part.module.named_modules():
            if name.endswith(("word_embeddings", "output_layer")) and hasattr(layer, "weight"):
                weight = layer.weight
                said = weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride
                layers[name] = type(layer).__name__, weight.detach().numpy().copy(), said
        ends = part.module.pre_process, part.module.post_process, part.module.share_embeddings_and_output_weights
        found.append((layers, ends))
    return found


def look(rank, ranks, settings, chunks, tied, tensor):
    """What a rank has of the vocabulary before the view, inside and after it, and after one that doubles its weights.

    A layer that a reader keeps must have its shape after the view, but no rows.
    """
    import megatron_vp
    from megatron_vp.mcore import patch_table, patches

    if settings is None:
        patches.apply(patch_table.patches_of("cpu platform"))
    else:
        megatron_vp.enable(**settings)
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    with process_group(rank, ranks):
        model = own_loop.start(ranks // tensor, chunks, tied, tensor)
        before, names = vocabulary_of(model), [name for part in model for name, _ in part.named_parameters()]
        with megatron_vp.whole_vocabulary(model), megatron_vp.whole_vocabulary(model):
            inside = vocabulary_of(model)
            for index, part in enumerate(model):
                stage = index if chunks > 1 else None
                first = get_transformer_layer_offset(part.module.config, stage)
                assert all(layer.layer_number == first + at + 1 for at, layer in enumerate(part.module.decoder.layers))
            weights = [weight for part in model for weight in part.parameters()]
        assert names == [name for part in model for name, _ in part.named_parameters()]
        own, after = {id(weight) for part in model for weight in part.parameters()}, vocabulary_of(model)
        for weight in weights:
            if id(weight) not in own:
                assert weight.untyped_storage().nbytes() == weight.element_size() and weight.isnan().all()
                assert weight.shape == (own_loop.VOCAB // tensor, 64)
        with megatron_vp.whole_vocabulary(model), megatron_vp.whole_vocabulary(model, write=True):
            for part in model:
                for name, weight in part.named_parameters():
                    if "word_embeddings" in name or ("output_layer" in name and not tied):
                        weight.data *= 2
        return before, inside, after, vocabulary_of(model)


def same(first, second):
    for (layers, ends), (others, other_ends) in zip(first, second, strict=True):
        assert ends == other_ends and layers.keys() == others.keys()
        for name, (kind, weight, said) in layers.items():
            assert (kind, said) == (others[name][0], others[name][2])
            np.testing.assert_array_equal(weight, others[name][1])


VOCAB_2 = {"vocab_parallel": True}
V_HALF = {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-1", "pipeline_schedule": "v-half"}
CASES = [
    pytest.param(VOCAB_2 | {"vocab_shards": "24,16"}, 1, True, 2, id="tied-tensor"),
    pytest.param(V_HALF, 2, False, 1, id="v-half"),
    pytest.param(VOCAB_2 | {"vocab_shards": "0,40"}, 1, False, 1, id="no rows", marks=pytest.mark.slow),
    pytest.param(V_HALF, 2, True, 2, id="v-half-tied-tensor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("settings", "chunks", "tied", "tensor"), CASES)
def test_the_layers_stand_whole_where_plain_megatron_has_them(settings, chunks, tied, tensor):
    plain = [views[0] for views in run_ranks(2 * tensor, look, None, 1, tied, tensor)]
    ranks = run_ranks(2 * tensor, look, settings, chunks, tied, tensor)
    for rank, (before, inside, after, written) in enumerate(ranks):
        same(before, after)
        same(
            [({name: (kind, 2 * w, said) for name, (kind, w, said) in part.items()}, e) for part, e in before], written
        )
        assert not any(ends[0] or ends[1] for _, ends in before)
        assert before != inside and "ShardedOutputLayer" not in str(inside)
        if chunks == 1:
            expected = plain[rank]
        else:  # the first and the last stage of a V are on rank 0
            (first, _), (last, _) = plain[rank % tensor][0], plain[rank % tensor + tensor][0]
            expected = [(first, (True, False, tied)), (last, (False, True, tied))]
            if rank >= tensor:
                expected = [({}, (False, False, tied))] * 2
        same(inside, expected)
