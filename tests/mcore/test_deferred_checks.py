"""Test that Megatron's checks of losses and gradients are made, but not during a schedule."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.harness import run_ranks
from tests.harness.training import tiny_model, train_case


def where_numbers_are_read(rank: int, world_size: int, arguments: list[str]) -> tuple[int, int]:
    """Runs inside a rank: how often Megatron asked whether a number is NaN, within our schedule and outside of it."""
    import torch

    from megatron_vp.runtime.pipeline import Pipeline

    within, asked, is_nan, run = False, [], torch.isnan, Pipeline.run

    def watched_run(*args, **kwargs):
        nonlocal within
        within = True
        report = run(*args, **kwargs)
        within = False
        return report

    def watched_isnan(number):
        asked.append(within)
        return is_nan(number)

    with mock.patch.object(torch, "isnan", watched_isnan), mock.patch.object(Pipeline, "run", watched_run):
        train_case(rank, world_size, arguments)
    return asked.count(True), asked.count(False)


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}], ids=str)
def test_no_number_is_read_within_a_schedule_and_all_are_at_its_end(options):
    arguments = tiny_model(
        vocab_parallel=True,
        pipeline_model_parallel_size=2,
        eval_iters=1,
        eval_interval=2,
        micro_batch_size=1,
        **options,
    )
    (within_first, after_first), (within_last, after_last) = run_ranks(2, where_numbers_are_read, arguments)
    assert within_first == within_last == 0
    # 8 microbatches a step and evaluation; Megatron leaves the first step alone. Gradients are checked on both ranks.
    assert after_first >= 2
    assert after_last >= after_first + 2 * 8 + 8


def test_checks_are_made_in_order_of_what_the_numbers_were_and_after_a_failure_not_at_all():
    import torch

    from megatron_vp.mcore.training.loss_check import deferred_checks, deferring

    seen = []

    @deferring
    def validate(machine, result, rejection_func, message, fatal=True):
        seen.append((machine, float(result), rejection_func, message, fatal))

    loss = torch.ones(())
    with deferred_checks():
        validate("machine", loss, torch.isnan, message="first", fatal=False)
        loss /= 4
        validate("machine", loss, torch.isinf, "second")
        assert not seen
    assert seen == [("machine", 1.0, torch.isnan, "first", False), ("machine", 0.25, torch.isinf, "second", True)]
    with pytest.raises(RuntimeError), deferred_checks():
        validate("machine", loss, torch.isnan, "lost")
        raise RuntimeError
    validate("machine", loss, torch.isnan, "outside")
    assert [message for _, _, _, message, _ in seen] == ["first", "second", "outside"]
