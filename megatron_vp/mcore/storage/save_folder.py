"""Lets only one run at a time save to a folder, because two runs would silently overwrite each other's checkpoints.

Rank 0 claims the `--save` folder with a file `in_use_N.json`, where N is larger than the number of any other claim.
Creation fails if the file already exists, so only one of several competing runs succeeds, even on network file systems.
During the run, a thread keeps renewing the file's modification time.

A claim is void if it was made by an earlier attempt of the same SLURM job, or by a process on this machine that has
ended. A claim of a live process on this machine is valid. Any other claim is watched: if it is not renewed for
SILENCE_SECONDS, its run is considered dead. If that run is alive after all, it notices at its next save that its claim
is gone, and stops.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_vp.errors import UserError, printable, say
from megatron_vp.files import MIB, read_text
from megatron_vp.mcore.patches import Patch

BEAT_SECONDS = 10.0
SILENCE_SECONDS = 60.0

_NAME = re.compile(r"in_use_([1-9]\d{0,8})\.json")
_FIELDS = ("token", "host", "process", "started", "machine", "job", "attempt", "since")


class SaveFolder:
    """A checkpoint folder that this run wants to claim. Only rank 0 uses this class."""

    def __init__(self, folder: Path, option: str = "--save") -> None:
        self._folder = folder
        self._named = f"{option} {folder}"
        self._own: Path | None = None
        self._descriptor: int | None = None
        self._watched: dict[Path, tuple[Any, float]] = {}
        """For each claim that may be void, its state when this run first saw it, and the time of that observation."""
        self._identity = _identity()

    def take(self) -> bool:
        """Try to claim the folder. Returns False if another claim may still be valid; callers should then retry later.

        Raises UserError if another run uses the folder, or if the folder is not writable.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            void = self._claims()
            return all(map(self._is_void, void)) and self._create(void)
        except OSError as error:
            raise UserError(
                f"cannot write to {self._named}: {error.strerror}; choose a writable directory with free space"
            ) from error

    def check(self) -> bool:
        """Raise UserError if another run has taken over the folder. If this run's claim is missing and there is no
        other claim, claim the folder again.
        """
        assert self._own is not None
        found = _read(self._own)
        if found is not None and found[0]["token"] in ("", self._identity["token"]):  # "": unreadable
            return True
        others = self._claims()
        if others or not self._create([]):
            taker = _read(others[-1]) if others else None
            raise UserError(
                f"{self._named} was taken over by {_who(taker[0]) if taker else 'another run'}, because this run did "
                f"not renew its claim within {SILENCE_SECONDS:g} s: this run stops without saving, so that it does not "
                f"overwrite the other run's checkpoints"
            )
        return True

    def release(self) -> None:
        """Remove the claim."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._own is not None and os.getpid() == int(self._identity["process"]):
            with suppress(OSError):
                os.close(descriptor)
            found = _read(self._own)
            if found is not None and found[0]["token"] == self._identity["token"]:
                with suppress(OSError):
                    self._own.unlink()

    def _claims(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted((path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)), key=_number)
        return []

    def _is_void(self, claim: Path) -> bool:
        found = _read(claim)
        if found is None:  # The claim was removed after it was listed.
            return False
        owner, looks = found
        ours = self._identity
        if owner["job"] and owner["job"] == ours["job"] and _whole(owner["attempt"]) < _whole(ours["attempt"]):
            return True
        alive = _alive(owner) if owner["machine"] and owner["machine"] == ours["machine"] else None
        if alive is None:
            alive = self._renewed(claim, owner, looks)
        if alive:
            raise UserError(
                f"{self._named} is in use by {_who(owner)}, and two runs would overwrite each other's checkpoints: "
                f"wait until that run has ended, stop it, or use another directory"
            )
        return alive is False

    def _renewed(self, claim: Path, owner: dict[str, str], looks: Any) -> bool | None:
        """Whether the run that made a claim keeps renewing it; None if this is not known yet."""
        now = time.monotonic()
        if claim not in self._watched:
            self._watched[claim] = looks, now
            say(
                f"megatron_vp: {self._named} was claimed by {_who(owner)}: waiting up to "
                f"{SILENCE_SECONDS:g} s to see whether that run is still alive"
            )
        before, since = self._watched[claim]
        if looks != before:
            return True
        return False if now - since >= SILENCE_SECONDS else None

    def _create(self, void: Sequence[Path]) -> bool:
        """Create a claim that replaces void claims; return False if another run was faster."""
        path = self._folder / f"in_use_{_number(void[-1]) + 1 if void else 1}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, json.dumps(self._identity).encode())
            os.fsync(descriptor)
            # `void` may be out of date. A second run may have made and removed a claim at `path`, and a third run may
            # now hold a valid claim.
            if set(self._claims()) - {path, *void}:
                raise FileExistsError
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            if isinstance(error, FileExistsError):
                return False
            raise
        for claim in void:
            with suppress(OSError):
                claim.unlink()
        first, self._own, self._descriptor = self._own is None, path, descriptor
        if first:
            atexit.register(self.release)
            threading.Thread(target=self._renew, daemon=True).start()
        return True

    def _renew(self) -> None:
        while (descriptor := self._descriptor) is not None:
            with suppress(OSError):  # A later attempt succeeds if the file system responds again.
                os.utime(descriptor)
            time.sleep(BEAT_SECONDS)


def _identity() -> dict[str, str]:
    job = os.environ.get("SLURM_JOB_ID", "")
    return {
        "token": secrets.token_hex(8),
        "host": socket.gethostname(),
        "process": str(os.getpid()),
        "started": _started(os.getpid()) or "",
        "machine": _machine(),
        "job": f"{job} {os.environ.get('SLURM_CLUSTER_NAME', '')}".strip() if job else "",
        "attempt": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _machine() -> str:
    """Return a name shared by all processes that see the same process numbers as this process; empty if unknown.

    The host name cannot be used, because containers with the same host name may number processes differently.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(process: int) -> str | None:
    """Return the start time of a process, in ticks after boot; None if the process has ended, but /proc still shows it.

    Raises OSError if /proc does not show the process.
    """
    state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def _alive(owner: dict[str, str]) -> bool | None:
    """Whether a process of this machine is alive; None if this user may not see the process.

    The process is identified by its number and its start time, because numbers are reused.
    """
    process = _whole(owner["process"])
    if process == os.getpid() or process == 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # The process exists, but belongs to another user.
        pass
    try:
        return _started(process) == owner["started"]
    except OSError:
        return None


def _read(claim: Path) -> tuple[dict[str, str], Any] | None:
    """Read a claim: return its fields, and a value that changes when the claim is renewed; None if the file is gone. If
    the file cannot be read, all fields are empty.
    """
    try:
        # Open the file before `stat`, because opening makes a network file system fetch the file's current state.
        with suppress(UserError, ValueError, RecursionError):
            found = json.loads(read_text(claim, "claim", MIB))
            found = found if isinstance(found, dict) else {}
            owner = {name: printable(str(found.get(name, "")), 100) for name in _FIELDS}
            status = claim.stat(follow_symlinks=False)
            return owner, (owner, status.st_ino, status.st_mtime_ns)
        status = claim.stat(follow_symlinks=False)
    except OSError:
        return None
    return dict.fromkeys(_FIELDS, ""), (status.st_ino, status.st_mtime_ns)


def _who(owner: dict[str, str]) -> str:
    if not owner["process"]:
        return "an unknown run"
    job = f"SLURM job {owner['job']}, " if owner["job"] else ""
    return f"process {owner['process']} on {owner['host']} ({job}since {owner['since']})"


def _number(claim: Path) -> int:
    found = _NAME.fullmatch(claim.name)
    assert found is not None
    return int(found[1])


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


_claimed: SaveFolder | None = None
"""The folder that rank 0 has claimed; None on other ranks, and if no folder is claimed."""
_guarded = False
"""Whether this run has claimed a folder; the same on all ranks."""


def saves_to(args: argparse.Namespace) -> tuple[str, str] | None:
    """Return the option that names the folder for a run's checkpoints, and the folder; None if the run saves nothing.

    When a run converts a checkpoint, Megatron sets `--save` only after it has loaded the checkpoint, so the folder
    follows from --ckpt-convert-save.
    """
    if args.ckpt_convert_format is not None:
        return "--ckpt-convert-save", os.path.join(args.ckpt_convert_save, args.ckpt_convert_format)
    return None if args.save is None or args.skip_train else ("--save", args.save)


def claim(option: str, folder: str) -> None:
    """Claim for this run the folder that `option` names. All ranks must call this function, which returns once the
    folder is claimed.

    Object storage (`SCHEME://`) is not claimed. Raises UserError on every rank if another run uses the folder.
    """
    global _claimed, _guarded
    if "://" in folder:
        return
    if torch.distributed.get_rank() == 0:
        _claimed = SaveFolder(Path(folder), option)
    while not agreed(_take):
        pass
    _guarded = True


def _take() -> bool:
    assert _claimed is not None
    if _claimed.take():
        return True
    time.sleep(random.uniform(0.5, 1.0))
    return False


def agreed(act: Callable[[], Any]) -> Any:
    """Run `act` on rank 0, and return its result or raise its UserError on every rank."""
    said: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            said[0] = act()
        except UserError as error:
            said[1] = str(error)
    torch.distributed.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise UserError(said[1])
    return said[0]


def check_claim() -> bool:
    """On rank 0, raise UserError if another run has taken over this run's folder. Otherwise return True."""
    return _claimed is None or _claimed.check()


def _only_where_claimed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if _guarded:
            agreed(check_claim)
        return original(*args, **kwargs)

    return save_checkpoint


PATCHES = (
    Patch(
        "megatron.training.training:save_checkpoint",
        _only_where_claimed,
        "two runs with the same --save would silently overwrite each other's checkpoints",
        "(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, "
        "checkpointing_context=None, pipeline_rank=None, expert_rank=None, tensor_rank=None, pipeline_parallel=None, "
        "expert_parallel=None, non_persistent_ckpt=False, train_data_iterator=None, "
        "preprocess_common_state_dict_fn=None, release=False, tp_group=None, pp_group=None, dp_cp_group=None, "
        "dp_group=None, expt_dp_group=None, rng_state_key_prefix='')",
    ),
)
