"""Test Megatron's index helpers, which a checkout of Megatron compiles at its first start if it can."""

import importlib.util

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore import patches
from megatron_vp.mcore.platform import index_helpers


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """Without compiled helpers, and with the tools in a folder that is the whole PATH."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.endswith("helpers_cpp") else found(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    def tools(**texts):
        for name, text in texts.items():
            tool = tmp_path / name.replace("_", "-").replace("gxx", "g++")
            tool.write_text(f"#!/bin/sh\n{text}\n")
            tool.chmod(0o755)

    return tools


def test_the_wheels_helpers_are_taken_as_they_are(monkeypatch):
    monkeypatch.setenv("PATH", "")
    index_helpers.check_index_helpers()


@pytest.mark.parametrize(
    ("tools", "missing"),
    [
        ({}, "make"),
        ({"make": ""}, r"g\+\+"),
        ({"make": "", "gxx": "", "python3": "exit 1", "python3_config": ""}, "pybind11"),
        ({"make": "", "gxx": "", "python3": "exit 0", "python3_config": ""}, None),
    ],
)
def test_what_a_checkout_lacks_is_named_before_a_rank_waits(checkout, tools, missing):
    checkout(**tools)
    if missing is None:
        index_helpers.check_index_helpers()
    else:
        with pytest.raises(
            UserError, match=f"with {missing}.*, which is not installed: install it, compile the helpers"
        ):
            index_helpers.check_index_helpers()


def test_a_compiler_that_fails_is_one_line(checkout):
    from megatron.core.datasets import utils

    checkout(make="exit 2")
    with patches.patched(index_helpers.PATCHES), pytest.raises(UserError, match="could not compile its index helpers"):
        utils.compile_helpers()
