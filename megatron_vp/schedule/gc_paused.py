"""Pauses Python's garbage collector while large schedules are generated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection in a `with` block or a decorated function.

    The collector would scan the several hundred thousand objects of a large schedule, which have no cycles, again and
    again; creating them would take a third longer.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
