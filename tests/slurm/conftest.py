"""The cluster to which the tests of this folder submit."""

import pytest

from tests.slurm.cluster import Cluster, unavailable


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no SLURM: {reason}")
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running
