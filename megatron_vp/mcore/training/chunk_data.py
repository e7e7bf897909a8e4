"""Makes skipped iterations (`--iterations-to-skip`) work on ranks with several chunks or without data.

If a rank has virtual pipeline stages, Megatron gives the rank a list of data iterators, one per chunk. Megatron's
function that skips an iteration does not expect a list, nor a middle stage, which has no data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine


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
