"""Test that NaN or infinite losses end a run as in plain Megatron, and that invalid token ids are named."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

from megatron_vp.mcore.training import loss_check
from tests.harness import run_ranks, run_ranks_to_their_end
from tests.harness.training import train_case
from tests.mcore.faults import Fault, few_steps, injected, to_a_large_id, to_infinity, to_nan, train_with_fault
from tests.runtime.device_double import Device

RERUN = 16
"""Megatron ran the iteration again, found the same, saved a checkpoint, and asks to be started on other devices."""


@pytest.mark.parametrize(
    ("act", "options", "status"),
    [
        pytest.param(to_infinity, {}, RERUN, id="infinite"),
        pytest.param(to_nan, {"fp16": True, "loss_scale": 1024}, RERUN, id="fp16, constant scale"),
        pytest.param(to_nan, {"no_check_for_nan_in_loss_and_grad": True}, 0, id="not checked"),
    ],
)
@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_a_run_where_it_ends_plain_megatron(act, options, status, tmp_path):
    options = {**options, "save": tmp_path, "save_interval": 10}
    for whole in (True, False):
        arguments = few_steps(vocab_parallel=not whole, **options)
        ends = run_ranks_to_their_end(2, train_with_fault, arguments, Fault(act, 1, "loss"))
        assert [status for status, _ in ends] == [status, status]


@pytest.mark.parametrize(
    ("scale", "fault", "first"),
    [pytest.param(2**21, None, 0, id="gradients"), pytest.param(1024, Fault(to_nan, 1, "loss"), 2, id="loss")],
)
@pytest.mark.slow
def test_an_overflow_under_dynamic_loss_scaling_skips_the_step_that_plain_megatron_skips(scale, fault, first):
    options = {"fp16": True, "initial_loss_scale": scale, "hysteresis": 1}
    plain, ours = (
        run_ranks(2, losses_with_fault, few_steps(vocab_parallel=vocab_parallel, **options), fault)[1]
        for vocab_parallel in (False, True)
    )
    skips = [[step for step, loss in enumerate(losses) if loss is None] for losses in (plain, ours)]
    assert skips[0] == skips[1] and skips[0][0] == first
    taken = [[loss for loss in losses if loss is not None] for losses in (plain, ours)]
    assert taken[1] == pytest.approx(taken[0], rel=1e-4) and taken[0]


def losses_with_fault(rank, world_size, arguments, fault):
    """Losses of the steps, None where one was skipped."""
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    script.prepare()
    with injected(fault, rank):
        return train_case(rank, world_size, arguments).losses


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            Fault(to_a_large_id, 0, "tokens"),
            "token id 512 is outside the vocabulary of 512",
            marks=pytest.mark.slow,
        ),
        (Fault(to_a_large_id, 1, "labels"), "label 512 of microbatch 2 is outside the vocabulary of 512"),
    ],
)
def test_an_id_outside_the_vocabulary_is_named(fault, said):
    """All ranks get the token ids, so any of them may be the first to refuse one; labels reach only the last rank."""
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(), fault)
    assert all(status in (1, 2) and "Traceback" not in output for status, output in ends)
    refused = {rank: output for rank, (status, output) in enumerate(ends) if status == 2}
    assert refused and (fault.where == "tokens" or [*refused] == [fault.rank])
    assert all(f"rank {rank}: error: {said}" in output for rank, output in refused.items())


@pytest.mark.parametrize("gradients", [True, False])
def test_judging_losses_does_not_hold_up_a_gpu(gradients):
    with mock.patch.object(loss_check, "_deferred", []), Device().active():
        labels_bs = torch.zeros(2, 8, dtype=torch.int64, device="cuda")
        gradient_ks = torch.zeros(4, 8, device="cuda") if gradients else None
        loss_check.check_labels(0, labels_bs, gradient_ks, 100)
