"""Every rank has to run the same job. A node with another file or another installation is found before it can do harm.

Ranks of different numbers of microbatches wait for each other for ever; different learning rates, or other versions of
this package, give a model that nobody asked for, in silence. Only then does the job write to its folders, and only if
no other job saves to the same place.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args

import megatron_vp
from megatron_vp.errors import UserError
from megatron_vp.mcore import choices
from megatron_vp.mcore.options.arguments import write_resolved_configuration
from megatron_vp.mcore.patches import Patch, installed_version
from megatron_vp.mcore.platform.installed import installed
from megatron_vp.mcore.storage.save_folder import agreed, claim

_OF_A_RANK = {"rank", "local_rank", "node_rank"}
# Other texts are paths, which nodes may have in different places.
_TEXTS = {
    "pipeline_schedule",
    "schedule_fingerprint",
    "vocab_parallel_algorithm",
    "vocab_rows",
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "lr_decay_style",
    "optimizer",
    "split",
}


def facts(arguments: dict[str, Any]) -> dict[str, str]:
    """What all ranks must have alike, as text by name: numbers, switches, choices, versions of packages, our code."""
    alike = {
        name: str(value)
        for name, value in arguments.items()
        if name not in _OF_A_RANK and (isinstance(value, bool | int | float | Enum) or name in _TEXTS)
    }
    packages = {
        "megatron_vp": megatron_vp.__version__,
        "megatron-core": installed_version(),
        "torch": torch.__version__,
        "Transformer Engine": installed().engine,
    }
    parts = {f"who computes the {part}": who for part, who in arguments.get("_parts", {}).items()}
    versions = {f"the version of {package}": str(found) for package, found in packages.items()}
    return alike | parts | versions | {"the code of megatron_vp": code(Path(megatron_vp.__file__).parent)}


def code(package: Path) -> str:
    """A fingerprint of a package's sources: two checkouts may go by one version."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def difference(ranks: list[dict[str, str]]) -> str:
    """The first name in which not all `ranks` agree, each value with its ranks."""
    names = dict.fromkeys(name for each in ranks for name in each)
    name = next(name for name in names if len({each.get(name) for each in ranks}) > 1)
    values: dict[str | None, list[int]] = {}
    for rank, each in enumerate(ranks):
        values.setdefault(each.get(name), []).append(rank)
    return f"{name} is " + ", ".join(f"{value} on {_counted(found)}" for value, found in values.items())


def _counted(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks (the first is {ranks[0]})"


def _with_the_same_job(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize_distributed(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        arguments = get_args()
        if arguments.fake_process_group:
            return
        own = facts(vars(arguments))
        digests: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(digests, hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest())
        if len(set(digests)) > 1:
            everyone: list[Any] = [None] * len(digests)
            torch.distributed.all_gather_object(everyone, own)
            raise UserError(
                f"the ranks were not given the same job: {difference(everyone)}; start all of them with the same "
                f"configuration, flags and installation"
            )
        order = [choices.order]  # of devices that may differ
        torch.distributed.broadcast_object_list(order, src=0)
        choices.order = order[0]
        if arguments.save is not None and not arguments.skip_train:
            claim(arguments.save)
        agreed(functools.partial(write_resolved_configuration, arguments))

    return initialize_distributed


PATCHES = (
    Patch(
        "megatron.training.initialize:_initialize_distributed",
        _with_the_same_job,
        "compares the ranks' arguments and versions: a node with another file would hang the others or spoil the "
        "model; then takes the order costs of rank 0, claims the --save folder for this run and writes "
        "the resolved configuration",
        "(get_embedding_ranks, get_position_embedding_ranks, store, skip_model_parallel_init=False)",
    ),
)
