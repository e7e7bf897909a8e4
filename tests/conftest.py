"""The slow marker: `pytest -m slow` runs the longer matrices, which are left out otherwise."""

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: longer matrices; run with -m slow only")


def pytest_collection_modifyitems(config, items):
    if "slow" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="slow: runs with -m slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
