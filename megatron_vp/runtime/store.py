"""What an iteration keeps between passes, with the two properties that stale state would break."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Store:
    """Values keyed by what they are and the microbatch they belong to.

    Nothing is overwritten and nothing is left behind: either would be a value of another microbatch or iteration.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def put(self, key: Hashable, value: Any, uses: int = 1) -> None:
        """Keep a new value until it has been taken `uses` times."""
        assert key not in self._values, f"{key} is kept already"
        if uses:
            self._values[key] = (value, uses)

    def take(self, key: Hashable) -> Any:
        """A value; its last use removes it."""
        value, uses = self._values.pop(key)
        if uses > 1:
            self._values[key] = (value, uses - 1)
        return value

    def assert_empty(self) -> None:
        """Check the end of an iteration."""
        assert not self._values, f"left over at the end of an iteration: {sorted(map(str, self._values))}"


class Occupancy:
    """Counts things that come and go, and remembers the most there were at once."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def enter(self) -> None:
        """One more."""
        self.now += 1
        self.peak = max(self.peak, self.now)

    def leave(self) -> None:
        """One less."""
        self.now -= 1
