"""A checkpoint written with vocabulary parallelism continues in plain Megatron, at another size, and back."""

from __future__ import annotations

from functools import cache

import pytest

from tests.harness.training import Run, tiny_model, train

ROWS = 40  # uneven on three ranks
VOCAB_1 = {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-1"}
VOCAB_2 = {"vocab_parallel": True}
V_HALF = {"vocab_parallel": True, "pipeline_schedule": "v-half"}
WHOLE_V_HALF = {"pipeline_schedule": "v-half"}
PLAIN: dict[str, object] = {}
RESHARDABLE = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}

# Written at (p, options), read at (p, options), tied, optimizer options.
MOVES = [
    ((3, VOCAB_2), (2, PLAIN), False, {}),
    ((2, PLAIN), (3, VOCAB_2), False, {}),
    ((2, VOCAB_2), (3, VOCAB_1), True, {}),
    ((3, VOCAB_1), (1, PLAIN), True, RESHARDABLE),
    ((1, PLAIN), (3, VOCAB_2), False, RESHARDABLE),
    ((2, V_HALF), (3, PLAIN), True, {}),
    ((1, PLAIN), (3, V_HALF), False, {}),
    pytest.param((2, WHOLE_V_HALF), (3, V_HALF), False, RESHARDABLE, marks=pytest.mark.slow),
]


def _arguments(size: int, tied: bool, **changes: object) -> list[str]:
    return tiny_model(
        num_layers=6,
        lr=1e-3,
        train_iters=4,
        pipeline_model_parallel_size=size,
        vocab_size=ROWS - 1,
        make_vocab_size_divisible_by=4,
        untie_embeddings_and_output_weights=not tied,
        **changes,
    )


@cache
def _uninterrupted(tied: bool) -> Run:
    return train(1, _arguments(1, tied))


@pytest.mark.parametrize(("written", "read", "tied", "optimizer"), MOVES)
def test_training_continues_as_if_nothing_had_happened(tmp_path, written, read, tied, optimizer):
    (size, method), (other_size, other_method) = written, read
    train(size, _arguments(size, tied, save=tmp_path, save_interval=2, exit_interval=2, **method, **optimizer))
    rest = train(
        other_size,
        _arguments(other_size, tied, load=tmp_path, **other_method, **optimizer),
        same_weights=False,
    )
    # The fourth loss comes after an update by the optimizer's restored state.
    assert rest.losses == pytest.approx(_uninterrupted(tied).losses[2:], rel=2e-6)
