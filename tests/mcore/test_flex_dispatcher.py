"""Test the flex token dispatcher in every schedule against plain Megatron, with stand-ins for DeepEP's two kernels."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, comparable_model, train_case
from tests.mcore.case_parts import (
    BOTH,
    DEEPSEEK,
    EVERY_SHAPE,
    FP32,
    PAIRS,
    way_options,
)
from tests.mcore.comparison import assert_equal

RANKS = 4


def fused_dispatch(
    rows_nh: torch.Tensor, experts_nk: torch.Tensor, weights_nk: torch.Tensor, experts: int, group: Any, **_: Any
) -> tuple[Any, ...]:
    """A row goes once to every rank that holds one of its experts, with their local numbers (-1: of another rank).

    Returns rows, local numbers, weights, how many rows each local expert gets, and what `fused_combine` needs.
    """
    from megatron.core.tensor_parallel import all_to_all

    local, ranks = experts // group.size(), group.size()
    owner_nk = torch.div(experts_nk, local, rounding_mode="floor")  # of dropped experts, -1, it is -1
    sent = [(owner_nk == rank).any(1).nonzero().flatten() for rank in range(ranks)]
    sizes = torch.tensor([len(each) for each in sent])
    received = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(received, sizes, group=group)
    splits = group, received.tolist(), sizes.tolist()
    order = torch.cat(sent)
    mine = owner_nk[order] == torch.arange(ranks).repeat_interleave(sizes)[:, None]
    numbers = torch.where(mine, experts_nk[order] % local, -1)
    weights = torch.where(mine, weights_nk[order], 0.0)
    exchanged = [all_to_all(splits[0], part, *splits[1:]) for part in (rows_nh[order], numbers, weights)]
    numbers = exchanged[1]
    counts = torch.bincount(numbers[numbers >= 0], minlength=local)
    return *exchanged, counts, (order, splits, len(rows_nh))


def fused_combine(rows: torch.Tensor, group: Any, handle: tuple[Any, ...], **_: Any) -> tuple[torch.Tensor, None]:
    """The sum of what the ranks have made of each row, [n, h], in the order that was dispatched."""
    from megatron.core.tensor_parallel import all_to_all

    order, (_, received, sizes), count = handle
    returned = all_to_all(group, rows, sizes, received)
    return rows.new_zeros(count, rows.shape[1]).index_add(0, order, returned), None


def flex_case(rank: int, world_size: int, arguments: list[str], same_weights: bool) -> Run | None:
    """`train_case` with the stand-in."""
    from megatron.core.transformer.moe import token_dispatcher

    with mock.patch.multiple(
        token_dispatcher,
        fused_dispatch=fused_dispatch,
        fused_combine=fused_combine,
        set_deepep_num_sms=lambda number: None,
    ):
        return train_case(rank, world_size, arguments, same_weights=same_weights)


@cache
def _trained(same_weights: bool = True, **changes: object) -> Run:
    sizes = {"global_batch_size": 8, "train_iters": 3, "pipeline_model_parallel_size": 2}
    experts = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"}
    words = comparable_model(**{**sizes, **DEEPSEEK, **experts, **BOTH, **changes})
    return _merge(run_ranks(RANKS, flex_case, words, same_weights, timeout=240))


@pytest.mark.parametrize(
    ("method", "pairs"),
    [
        (EVERY_SHAPE[0], {}),
        pytest.param(EVERY_SHAPE[2], {}, marks=pytest.mark.slow),
        pytest.param("dualpipe-v/vocab-2", PAIRS, marks=pytest.mark.slow),
    ],
)
def test_every_step_equals_plain_megatron_with_the_same_dispatcher(method, pairs):
    sizes = {"global_batch_size": 16} if pairs else {}
    found = _trained(**way_options(method), **pairs, **sizes)
    assert_equal(found, _trained(**sizes), FP32)
    assert bool(found.pairs) == bool(pairs)
