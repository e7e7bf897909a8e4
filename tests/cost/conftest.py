"""Fixtures that tests of the planning commands share."""

import functools

import pytest

from megatron_vp.cost.planning.search import Search
from tests.cost.small_job import SMALL

MADE: dict[str, Search] = {}
"""Searches of this test session by what they were asked."""


@pytest.fixture
def small(tmp_path):
    """A configuration file of a small job."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def search_once(monkeypatch):
    """Give every command the result of the first search for the same runs."""
    run = Search.run

    @functools.wraps(run)
    def made(self: Search) -> Search:
        asked = repr((self.tried, self.hardware, self.limit, self.budget, self.chunks, self.offload, self.given))
        asked += repr(self.arguments)
        if asked not in MADE:
            MADE[asked] = run(self)
        vars(self).update(vars(MADE[asked]))
        return self

    monkeypatch.setattr(Search, "run", made)
