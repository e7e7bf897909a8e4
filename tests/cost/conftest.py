"""Fixtures that tests of the planning commands share."""

import pytest

from tests.cost.small_job import SMALL


@pytest.fixture
def small(tmp_path):
    """A configuration file of a small job."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path
