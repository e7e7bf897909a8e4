"""The `slow` marker, for long tests that run only with `pytest -m slow`, and Triton's interpreter for machines without
a GPU.
"""

import os

import pytest
import torch

import tests.harness.parsers  # noqa: F401

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which Megatron's utilities do, too


def pytest_collection_modifyitems(config, items):
    if "slow" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="slow: runs with -m slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)
