"""Test Hugging Face's weights into and out of a split model, through Megatron-Bridge, as post-training loops do it."""

from functools import partial

import numpy as np
import pytest

from tests.harness.ranks import process_group, run_ranks
from tests.mcore import bridge_loop
from tests.mcore.test_bridge import V_HALF, VOCAB_2, loaded, start

pytestmark = pytest.mark.skipif(bridge_loop.missing() is not None, reason=str(bridge_loop.missing()))
slow = pytest.mark.slow


def is_vocabulary(name):
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def built(source, ranks, chunks, tensor):
    """Bridge, and a model without its weights, wrapped as for training."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig

    bridge = AutoBridge.from_hf_pretrained(source, dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=False)
    bridge_loop._on_local_layers(provider, ranks // tensor, chunks)
    provider.tensor_model_parallel_size = tensor
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return bridge, provider.provide_distributed_model(DistributedDataParallelConfig(), use_cpu_initialization=True)


def trained(model):
    """Train `model`, of which the optimizer already exists, for one iteration."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0), model)
    generator = torch.Generator().manual_seed(7)
    sizes = bridge_loop.BATCH, bridge_loop.SEQUENCE
    texts = [torch.randint(bridge_loop.VOCAB, (2, *sizes), generator=generator) for _ in range(4)]
    places = torch.arange(sizes[1]).expand(sizes)

    def step(iterator, part):
        ids, labels = next(iterator)
        return part(ids, places, None, labels=labels), lambda losses: (losses.mean(), {})

    for part in model:
        part.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(texts) for _ in model] if len(model) > 1 else iter(texts),
        model=model if len(model) > 1 else model[0],
        num_microbatches=len(texts),
        seq_length=sizes[1],
        micro_batch_size=sizes[0],
    )
    optimizer.step()


def both_ways(rank, ranks, settings, chunks, tensor, source, given=None):
    """Load the weights of `source` and export them, train and export twice; with `given`, the weights of the ranks of
    another run, set these in place of training. Also the sizes of all tasks, and this rank's weights after training.
    """
    start(settings)
    with process_group(rank, ranks):
        from megatron.core.utils import unwrap_model

        bridge, model = built(source, ranks, chunks, tensor)
        bridge.load_hf_weights(model, source)
        tasks, exports = bridge.get_conversion_tasks(model), []
        sizes = {task.global_param_name: task.param_weight.numel() for task in tasks if task.param_weight is not None}

        def export():
            pairs = [
                (name, weight.numpy().copy()) for name, weight in bridge.export_hf_weights(model, True, False, tasks)
            ]
            assert len(dict(pairs)) == len(pairs)
            exports.append(dict(pairs))

        export()
        weights = [pair for chunk in unwrap_model(model) for pair in bridge_loop.by_place(chunk)]
        if given is None:
            trained(model)
        else:
            fill(weights, given, rank % tensor, tensor)
        export()
        export()
        return sizes, exports, {name: weight.detach().numpy().copy() for name, weight in weights}


def fill(weights, given, index, tensor):
    """Set the weights of a rank of plain Megatron, whose tensor rank is `index`, from those of all ranks of a run."""
    import torch

    for name, weight in weights:
        source = name if any(name in each for each in given) else "embedding.word_embeddings.weight"  # tied
        parts = [each[source] for each in given if source in each]
        if is_vocabulary(name):
            rows = np.concatenate(parts)
            value = np.split(rows, tensor)[index]
        else:
            value = next(each[source] for each in given[index::tensor] if source in each)
        weight.data.copy_(torch.from_numpy(value))


@pytest.mark.parametrize(
    ("settings", "chunks", "tied", "tensor"),
    [
        (VOCAB_2 | {"vocab_shards": "192,64"}, 1, False, 1),
        (V_HALF, 2, True, 1),
        pytest.param(VOCAB_2, 1, True, 1, marks=slow),
        pytest.param(V_HALF, 2, False, 1, marks=slow),
        pytest.param(VOCAB_2 | {"vocab_shards": "0,256"}, 1, False, 1, marks=slow),
        pytest.param(V_HALF | {"vocab_shards": "256,0"}, 2, True, 1, marks=slow),
        pytest.param(VOCAB_2, 1, True, 2, marks=slow),
        pytest.param(V_HALF, 2, False, 2, marks=slow),
    ],
)
def test_weights_go_in_and_out_of_a_split_model_with_the_bits_of_plain_megatron(
    tmp_path, settings, chunks, tied, tensor
):
    bridge_loop.save_hugging_face(tmp_path, tied=tied)
    run = partial(run_ranks, 2 * tensor, both_ways)
    ours = run(settings, chunks, tensor, str(tmp_path))
    plain = run(None, 1, tensor, str(tmp_path), [weights for *_, weights in ours])
    assert merged(ours) == merged(plain)
    source = {name: value for name, value in loaded(tmp_path).items() if not (tied and name == "lm_head.weight")}
    for (_, (first, *later), _), (_, expected, _) in zip(ours, plain, strict=True):
        np.testing.assert_equal(first, source)
        assert any((first[name] != later[0][name]).any() for name in first)
        np.testing.assert_equal([first, *later], expected)


def merged(ranks):
    """The size of each weight on the ranks that hold it, which are not the same ranks under every placement."""
    return {name: size for sizes, *_ in ranks for name, size in sizes.items()}
