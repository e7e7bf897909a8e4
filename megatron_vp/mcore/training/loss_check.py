"""Checks the labels of every microbatch, and defers Megatron's checks of losses and gradients.

The checks run on the device. The host reads the results of all checks once, at the end of the iteration, when Megatron
waits for the device anyway. With Megatron's defaults, the rank that runs the loss function would wait for the device
twice per microbatch, and launch no kernels meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from megatron_vp.errors import UserError

_deferred: list[Callable[[], None]] | None = None


def check_labels(microbatch: int, labels_bs: torch.Tensor, gradient_ks: torch.Tensor | None, vocab_size: int) -> None:
    """Raise UserError, at the end of `deferred_checks`, if a label is outside the padded vocabulary of `vocab_size`
    tokens and the loss depends on its token loss.

    There is no logit for such a label. Masked positions may have any label. In evaluation, there are no gradients that
    show which token losses matter, so negative labels, which usually mark ignored positions, are accepted.

    Args:
        labels_bs: int64 [b, s].
        gradient_ks: the gradients of the loss with respect to the token losses: [b, s] for the next token, followed by
            [b, s] for each further predicted token; None in evaluation.
    """
    counts_bs = labels_bs >= 0 if gradient_ks is None else gradient_ks[: len(labels_bs)] != 0
    wrong_bs = ((labels_bs < 0) | (labels_bs >= vocab_size)) & counts_bs
    labels = torch.where(wrong_bs, labels_bs, 0).flatten()
    worst = labels.take(labels.abs().argmax())  # Indexing with `[]` would copy the index to the host.

    def judge() -> None:
        if label := int(worst):  # Label 0 is always inside the vocabulary.
            raise outside_vocabulary(label, vocab_size, f" of microbatch {microbatch}")

    defer(judge)


def outside_vocabulary(label: int, vocab_size: int, where: str = "") -> UserError:
    """The error for a label that has no logit, although the loss depends on it."""
    return UserError(
        f"label {label}{where} is outside the vocabulary of {vocab_size} tokens: use the tokenizer with which the data "
        "was encoded, and exclude ignored positions through the loss mask"
    )


def defer(check: Callable[[], None]) -> None:
    """Run a check at the end of `deferred_checks`; outside of it, run the check now."""
    check() if _deferred is None else _deferred.append(check)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Inside this context, checks are only recorded. On exit, they run in order.

    The checks still run before the optimizer step. After an exception, no checks run.
    """
    global _deferred
    assert _deferred is None
    _deferred = waiting = []
    try:
        yield
    finally:
        _deferred = None
    for check in waiting:
        check()


def deferring(validate_result: Callable[..., None]) -> Callable[..., None]:
    """Wrap Megatron's `RerunStateMachine.validate_result` so that its checks are deferred inside `deferred_checks`."""

    @wraps(validate_result)
    def deferred(self: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        # Copy the result, because the schedule later scales the loss in place.
        kept = result.detach().clone() if isinstance(result, torch.Tensor) else result
        defer(partial(validate_result, self, kept, *args, **kwargs))

    return deferred
