"""Test multi-token prediction: the output layer is split for every head; all results are as in plain Megatron.

The reference is plain Megatron in one process. Each case is one line.
"""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_vp.runtime.buffers import Shapes
from tests.harness import run_ranks
from tests.harness.ranks import process_group
from tests.harness.training import _merge, comparable_model, train_case
from tests.mcore.case_parts import (
    FP32,
    MUP,
    TIED,
    way_options,
)
from tests.mcore.comparison import assert_equal

PER_TOKEN = {"calculate_per_token_loss": True}
REPEATED = {"mtp_use_repeated_layer": True}
VP = {"vocab_parallel": True}
slow = pytest.mark.slow

# p, schedule, algorithm, heads beyond the first, options of both runs, options of the split one.
CASES = [
    (2, "1f1b", "vocab-2", 2, TIED, {}),
    pytest.param(3, "interlaced", "vocab-1", 1, PER_TOKEN, {}, marks=slow),
    pytest.param(2, "v-half", "vocab-2", 2, MUP, {}, marks=slow),
    pytest.param(2, "1f1b", "vocab-2", 1, {}, {"pipeline_model_parallel_layout": "Et|tttmL"}, marks=slow),
]


def laid_out(layout: str) -> dict[str, object]:
    return {"pipeline_model_parallel_layout": layout}


# MTP layers before the last stage; without an algorithm, the vocabulary layers are Megatron's own.
CASES += [
    pytest.param(4, "1f1b", "vocab-2", 1, TIED, laid_out("Ett|tt|m|L"), marks=slow),
    (3, "1f1b", None, 1, TIED, laid_out("Ettt|tttm|L")),
    pytest.param(4, "zb-h1", None, 2, TIED, laid_out("Ett|tt|mm|L"), marks=slow),
    pytest.param(4, "1f1b", "vocab-2", 1, {}, laid_out("Ett|t|tm|L"), marks=slow),
    pytest.param(4, "zb-h1", "vocab-2", 2, REPEATED, laid_out("Ett|tt|mm|L"), marks=slow),
    pytest.param(4, "interleaved", "vocab-2", 2, PER_TOKEN, laid_out("Et||t|t||t|mm|L"), marks=slow),
    pytest.param(2, "v-half", "vocab-2", 1, {}, laid_out("Ett|tt|m|L"), marks=slow),
    pytest.param(3, "zb-v", "vocab-1", 2, TIED, laid_out("Et|t|t|tt|tmm|L"), marks=slow),
]


def watched(rank: int, world_size: int, arguments: list[str]) -> tuple:
    """Runs inside a rank: the training, and what it logged of the further heads: loss, accepted and counted tokens."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    logged = []

    def save(loss, correct, total, head, heads, **_groups):
        logged.append((head, loss.item(), correct.item(), total.item()))

    with mock.patch.object(MTPLossLoggingHelper, "save_metrics_to_tracker", save):
        return train_case(rank, world_size, arguments), logged


def _arguments(**changes: object) -> list[str]:
    return comparable_model(**{"position_embedding_type": "rope"} | changes)


@pytest.mark.parametrize(("size", "schedule", "algorithm", "heads", "options", "ours"), CASES)
def test_every_step_equals_plain_megatron(size, schedule, algorithm, heads, options, ours):
    common = {"num_layers": 6 if size == 3 else 4, "mtp_num_layers": heads, **options}
    ((plain, expected),) = run_ranks(1, watched, _arguments(**common))
    split = _arguments(**common, **ours, **way_options(f"{schedule}/{algorithm or 'none'}", size, **ours))
    runs, logged = zip(*run_ranks(size, watched, split), strict=True)
    assert_equal(_merge(list(runs)), plain, FP32)
    assert not any(logged[:-1])
    assert len(logged[-1]) == len(expected) == 3 * 4 * heads
    for found, theirs in zip(logged[-1], expected, strict=True):
        assert found == pytest.approx(theirs, rel=FP32)


def looked_ahead(rank: int, world_size: int, depth: int) -> list[bool]:
    """Runs inside a context-parallel rank: whether each prediction's part is that of the whole sequence, shifted."""
    sys.argv = ["pretrain_gpt_vp.py"]
    import pretrain_gpt_vp as script

    script.prepare()
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_vp.mcore.model.multi_token import append_next_tokens

    whole_bs = torch.arange(1, 37).view(2, 18)
    with process_group(rank, world_size):
        group = torch.distributed.group.WORLD

        def part(values_bs: torch.Tensor) -> torch.Tensor:
            return get_batch_on_this_cp_rank({"tokens": values_bs}, is_hybrid_cp=False, cp_group=group)["tokens"]

        own_bs = part(whole_bs)
        cp_chunks = 1 if world_size == 1 else 2
        shapes = Shapes(own_bs.shape[1], 2, 1, torch.float32, torch.device("cpu"), mtp_depth=depth, cp_chunks=cp_chunks)
        extended_be = append_next_tokens(own_bs, depth, cp_chunks, group)
        assert extended_be.shape == shapes.token_ids().shape
        shifted = [torch.nn.functional.pad(whole_bs[:, k:], (0, k)) for k in range(1 + depth)]
        return [torch.equal(shapes.ahead(extended_be, k), part(each)) for k, each in enumerate(shifted)]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_part_of_a_sequence_looks_ahead_into_the_parts_of_others(parts):
    """Five positions ahead, further than a whole chunk of three."""
    assert run_ranks(parts, looked_ahead, 5) == [[True] * 6] * parts


def counted_alike(rank: int, world_size: int, arguments: list[str]) -> object:
    """Runs inside a rank: a training in which the loss leaves out the first two positions of each of 4 chunks.

    Megatron averages a head's loss over the tokens that count on each context-parallel rank, and its gradients over
    ranks: as over whole sequences only where as many count on every rank.
    """
    import pretrain_gpt_vp as script

    get_batch = script.get_batch

    def masked(*arguments: object) -> tuple[torch.Tensor | None, ...]:
        tokens, labels, loss_mask, *others = get_batch(*arguments)
        if loss_mask is not None:
            loss_mask.unflatten(1, (-1, 32))[:, :, :2] = 0
        return tokens, labels, loss_mask, *others

    with mock.patch.object(script, "get_batch", masked):
        return train_case(rank, world_size, arguments)


@slow
def test_parts_of_sequences_train_as_whole_ones_do():
    """Context parallelism 2, vocabulary parallel, against plain Megatron on whole sequences."""
    common = {"mtp_num_layers": 2, **PER_TOKEN}
    parts = {"context_parallel_size": 2, "core_attention": "sdpa", "pipeline_model_parallel_size": 2, **VP}
    whole = run_ranks(1, counted_alike, _arguments(**common))
    cut = _merge(run_ranks(4, counted_alike, _arguments(**common, **parts)))
    for found, expected in zip(cut.steps, _merge(whole).steps, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=FP32)
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            distance = np.linalg.norm(found.gradients[name] - gradient) / np.linalg.norm(gradient)
            assert distance <= FP32, f"gradient of {name}: {distance:.2e}"
