"""Makes skipped iterations and several validation sets work on ranks with several chunks or without data.

If a rank has virtual pipeline stages, Megatron gives the rank a list of data iterators, one per chunk. Two functions of
Megatron's training loop do not expect a list: skipping an iteration (`--iterations-to-skip`) crashes, and the
evaluation of several validation sets mistakes the list of chunks for the list of sets. Neither function handles a
middle stage, which has no data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.settled import current


def _skipping(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def dummy_train_step(data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None) -> None:
        """Advance the data iterator of every chunk by the microbatches of one iteration."""
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        rerun = get_rerun_state_machine()
        while rerun.should_run_forward_backward(data_iterator):
            for iterator in filter(None, iterators):
                for _ in range(get_num_microbatches()):
                    next(iterator)

    return dummy_train_step


def _counting_validation_sets(original: Callable[..., Any]) -> Callable[..., Any]:
    given = 0

    @functools.wraps(original)
    def build_train_valid_test_data_iterators(*arguments: Any, **options: Any) -> Any:
        """Call the original function. If this chunk has no data, set `args.eval_iters` to the numbers that the previous
        chunk's call has stored, or to zeros if this is the first chunk.
        """
        nonlocal given
        args = current().args
        # The previous chunk's call may have replaced `args.eval_iters` with a list of one number per validation set.
        if isinstance(args.eval_iters, list):
            counted, args.eval_iters = args.eval_iters, given
        else:
            counted, given = None, args.eval_iters
        iterators = original(*arguments, **options)
        if isinstance(args.eval_iters, list):
            _check_names(args.validation_set_names, len(args.eval_iters))
            if None in args.eval_iters:
                # Zeros suffice, because rank 0 has data, and all ranks receive its `eval_iters` before each evaluation.
                args.eval_iters = counted or [0] * len(args.eval_iters)
        return iterators

    return build_train_valid_test_data_iterators


def _check_names(names: list[str] | None, sets: int) -> None:
    if names and len(names) != sets:
        raise UserError(
            f"--validation-set-names gives {len(names)} names for {sets} validation sets: give one name per set, or "
            "leave the option out"
        )


def _by_validation_set(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate_and_print_results(
        prefix: str, forward_step_func: Any, data_iterator: Any, model: list[Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call the original function with the data iterators grouped by validation set instead of by chunk."""
        by_chunk = isinstance(data_iterator, list) and len(data_iterator) == len(model) > 1
        if (
            current().args.multiple_validation_sets
            and by_chunk
            and all(isinstance(each, list) for each in data_iterator)
        ):
            data_iterator = [list(chunks) for chunks in zip(*data_iterator, strict=True)]
        return original(prefix, forward_step_func, data_iterator, model, *arguments, **options)

    return evaluate_and_print_results


PATCHES = (
    Patch(
        "megatron.training.training:dummy_train_step",
        _skipping,
        "a skipped iteration would crash a run in which ranks have several chunks or some stages have no data",
    ),
    Patch(
        "megatron.training.training:build_train_valid_test_data_iterators",
        _counting_validation_sets,
        "a chunk without data would not know the number of evaluation iterations per validation set",
    ),
    Patch(
        "megatron.training.training:evaluate_and_print_results",
        _by_validation_set,
        "with several chunks, Megatron would mistake the data of each chunk for a validation set",
    ),
)
"""Patches that are applied with --iterations-to-skip or --multiple-validation-sets, even under Megatron's schedules."""
