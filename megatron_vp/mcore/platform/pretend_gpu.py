"""Lets a machine without GPUs, such as a login node, check a job that will run on GPUs.

While Megatron validates arguments, it reads the compute capability of the device and the version of Transformer Engine.
This module gives Megatron the values of a GPU node.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.installed import Installed

CAPABILITY = (9, 0)
ENGINE = "2.20.2"

_FUSED = ("megatron.core.models.common.embeddings.rope_utils", "megatron.core.transformer.moe.moe_utils")
"""Modules with functions of Transformer Engine, `fused_...`. Megatron refuses a fusion if its function is None."""


@contextmanager
def pretend_gpu(nodes: Installed) -> Iterator[None]:
    """Inside this context, let this process appear to have a CUDA device and the packages in `nodes`.

    This function does not import Megatron.
    """
    capability = nodes.capability or CAPABILITY
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], name="NVIDIA GPU")
    with (
        mock.patch.object(installed, "of_nodes", nodes),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
    ):
        yield


def assumed_nodes(asks_for_engine: bool) -> Installed:
    """Assume that a job's nodes have this machine's packages, and Transformer Engine if the job asks for it."""
    machine = installed.here()
    if asks_for_engine and machine.engine is None and machine.engine_fault is None:
        machine = replace(machine, engine=ENGINE)
    return machine


def assumptions(nodes: Installed) -> str:
    """Describe what is assumed about the nodes of a job."""
    engine = f" and Transformer Engine {nodes.engine}" if nodes.engine else ""
    missing = [name for name, found in (("Transformer Engine", nodes.engine), ("Apex", nodes.apex)) if not found]
    capability = f"assuming compute capability {'.'.join(map(str, nodes.capability or CAPABILITY))}{engine}"
    return capability + (f", without {' and '.join(missing)}" if missing else "")


@contextmanager
def pretend_engine() -> Iterator[None]:
    """Inside this context, let Megatron find Transformer Engine only if the nodes passed to `pretend_gpu` have it."""
    nodes = installed.of_nodes
    if nodes is None or nodes.engine == installed.here().engine:
        yield
        return
    with ExitStack() as put_back:
        utilities = importlib.import_module("megatron.core.utils")
        put_back.enter_context(
            mock.patch.object(utilities, "_te_version", utilities.PkgVersion(nodes.engine or "0.0.0"))
        )
        for module in map(importlib.import_module, _FUSED):
            for name in [name for name in vars(module) if name.startswith("fused_")]:
                stand_in = object() if nodes.engine else None
                put_back.enter_context(mock.patch.object(module, name, stand_in))
        yield
