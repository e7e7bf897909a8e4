"""Pauses Python's garbage collector while large schedules are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection in this block or decorated function.

    A large schedule is some hundred thousand small objects without cycles; the collector would look through all of them
    again and again as they grow, a third of the time it takes to make them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
