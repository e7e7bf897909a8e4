"""Checks before training that every rank runs the same job, to find nodes whose configuration or software differs.

Ranks with different numbers of microbatches would wait for each other forever, and different learning rates or versions
of this package would silently produce a different model. So all arguments are compared, except those that may differ
between machines.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megatron_vp
from megatron_vp.errors import PeerLost, UserError
from megatron_vp.jobs.command_line import name_of
from megatron_vp.jobs.resolved import plain
from megatron_vp.mcore.options.arguments import write_resolved_configuration
from megatron_vp.mcore.platform.installed import versions
from megatron_vp.mcore.settled import SettledJob, current, process
from megatron_vp.mcore.storage.save_folder import agreed, claim, saves_to
from megatron_vp.runtime.launcher_store import Notes, named

OF_A_RANK = {"rank", "local_rank", "node_rank", "config"}
"""Arguments that are not compared between ranks; the options in configuration files are compared instead."""

_PLACE = re.compile(
    "(^|_)(path|dir|file|filename|checkpoint|save|load|model|cfg|project|entity|name)$|^(rank_report|pipeline_trace)$|"
    "^(app_tag_run_version|dump_param_to_param_group_map|langrl_env_config)$"
)
"""Matches arguments whose texts name a file, a folder or a log. Machines may keep files in different places, and only
one rank uses a log's name, which may contain the time. Ranks compare only whether these arguments are given. If an
argument is a list, ranks also compare its length and the numbers in it, such as the weights of datasets.
"""


def facts(
    arguments: Mapping[str, Any], parts: Mapping[str, str] | None = None, given: Iterable[str] = ()
) -> dict[str, str]:
    """Return texts by name that must be equal on all ranks.

    They describe the job's arguments, including those that Megatron and this plug-in derive, the versions of packages,
    and our code.

    Args:
        arguments: values by name; names that begin with an underscore are left out.
        parts: the implementation of each part of the job.
        given: the names of arguments that the run was given. They come first, because arguments derived from them may
            differ as well.
    """
    alike = {
        name: _place(arguments[name]) if _PLACE.search(name) else str(plain(arguments[name]))
        for name in (*given, *arguments)
        if name in arguments and name not in OF_A_RANK and not name.startswith("_")
    }
    parts = {f"the implementation of the {part}": who for part, who in (parts or {}).items()}
    software = {f"the version of {package}": str(found) for package, found in versions().items()}
    return alike | parts | software | {"the code of megatron_vp": code(Path(megatron_vp.__file__).parent)}


def _place(value: Any) -> str:
    """Return the text that ranks compare instead of the value of a place."""
    if isinstance(value, list):
        return str([word if re.fullmatch(r"[\d.]+", word) else "PATH" for word in map(str, value)])
    return "given" if isinstance(value, str) else "not given" if value is None else str(plain(value))


def code(package: Path) -> str:
    """Return a fingerprint of a package's sources, which may differ between checkouts with the same version number."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def difference(first: dict[str, str], own: dict[str, str], rank: int) -> str:
    """Describe the first argument in which `rank` differs from rank 0: its name, and both values. Returns "" if all
    arguments are equal.
    """
    name = next((name for name in own | first if first.get(name) != own.get(name)), None)
    return "" if name is None else f"{name} is {first.get(name)} on rank 0, {own.get(name)} on rank {rank}"


def require_same_job(job: SettledJob) -> None:
    """Compare the ranks' jobs. Raises UserError on every rank if they differ, and PeerLost if a rank is missing."""
    own = facts(vars(job.arguments), job.parts, map(name_of, job.words.options))
    compare(own, 60.0 * job.arguments.distributed_timeout_minutes)


def settle_with_one_order(job: SettledJob) -> SettledJob:
    """Settle `job` with the pass costs of rank 0, because costs depend on the device. All ranks must call this."""
    order = [job.order]
    torch.distributed.broadcast_object_list(order, src=0)
    job = replace(job, order=order[0])
    process.job = job
    return job


def _with_the_same_job(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize_distributed(*args: Any, **kwargs: Any) -> None:
        job = current()
        if job.arguments.fake_process_group:
            return original(*args, **kwargs)
        # Compare the ranks' jobs before process groups exist, because ranks that create different groups have no common
        # communicator.
        require_same_job(job)
        original(*args, **kwargs)
        settle_with_one_order(job)
        if (folder := saves_to(job.arguments)) is not None:
            claim(*folder)
        agreed(functools.partial(write_resolved_configuration, job.args))
        if job.arguments.rank == 0:
            # Imported here, because the banner imports the cost model, which other ranks do not need.
            from megatron_vp.mcore.start.banner import print_banner

            print_banner(current())
        return None

    return initialize_distributed


def compare(own: dict[str, str], seconds: float) -> None:
    """Compare `own`, the result of `facts`, between all ranks, and wait for each of them for `seconds`.

    Raises as `require_same_job` does.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return
    models = len(process.own_loop.jobs) if process.own_loop else 0  # Each is compared in notes of its own.
    first, others, verdict = (Notes(f"start{models or ''}/{topic}") for topic in ("first", "others", "verdict"))
    if rank == 0:
        first.leave(0, json.dumps(own))
    known = json.loads(_all_of(first, range(1), seconds)[0])
    others.leave(rank, difference(known, own, rank))
    if rank == 0:
        found = list(filter(None, _all_of(others, range(ranks), seconds).values()))
        verdict.leave(0, found[0] + f", and {len(found)} ranks differ from it" * (len(found) > 1) if found else "")
    if apart := _all_of(verdict, range(1), seconds)[0]:
        way = "start every rank with the same configuration files, flags and package versions"
        raise UserError(f"the ranks did not get the same job: {apart}; {way}")


def _all_of(notes: Notes, ranks: range, seconds: float) -> dict[int, str]:
    found = notes.read(ranks, seconds)
    if silent := [rank for rank in ranks if rank not in found]:
        raise PeerLost(
            f"the job's start needs all ranks, but there is no word from {named(silent)} after {seconds:.0f} s"
        )
    return found
