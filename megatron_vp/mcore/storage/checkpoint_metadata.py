"""Reads the `.metadata` file of a torch_dist checkpoint, which is a pickle, without running any function that it names.

Loading a pickle calls any function that the pickle names, so a checkpoint from someone else can contain malicious code.
Checking a checkpoint, for example on a login node, must not run this code.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pickle
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch

_RECORDS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
"""Modules whose data classes and enumerations may be unpickled. The classes are not listed one by one, because torch
may add more.
"""

_OTHERS = {
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        # Refuse dotted names, because they can reach functions of imported modules, such as `os.system`.
        if "." not in name:
            if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype | torch.memory_format):
                return found
            if module in _RECORDS:
                found = getattr(importlib.import_module(module), name, None)
                is_record = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
                if is_record and found.__module__ == module:
                    return found
        raise pickle.UnpicklingError(
            f"the pickle refers to {module}.{name}, which does not belong in a checkpoint's metadata and was not "
            "executed"
        )


def read_metadata(folder: Path) -> Any:
    """Return the `torch.distributed.checkpoint.metadata.Metadata` of the checkpoint in `folder`.

    Raises pickle.UnpicklingError if the file names a function or class that does not belong in checkpoint metadata, and
    any other error that a damaged pickle may cause.
    """
    with (folder / ".metadata").open("rb") as file:
        return _Unpickler(file).load()
