"""Lets only one run at a time save to a folder, because two runs would silently overwrite each other's checkpoints.

Rank 0 locks a file in the `--save` folder. The kernel or the file server releases the lock when the process ends. A
forked child closes its copy of the file, so a child that outlives a killed run does not keep the lock.

The file says who holds the lock. A later attempt of a SLURM job replaces the file of an earlier attempt, because the
file server may not have noticed yet that the earlier attempt's node is lost.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_vp.errors import UserError, printable
from megatron_vp.files import warn_once
from megatron_vp.jobs.known_options import Arguments

LOCK = "megatron_vp.lock"
_UNGUARDED = "so this run cannot notice another run that saves there too"
_ATTEMPT = re.compile(r"\((SLURM job .*), attempt (\d{1,9}), since")


class SaveFolder:
    """A folder for checkpoints, which `take` locks for this process."""

    def __init__(self, folder: Path, option: str = "--save") -> None:
        self._path = folder / LOCK
        self._named = f"{option} {folder}"
        self._descriptor: int | None = None
        os.register_at_fork(after_in_child=self.release)

    def take(self) -> None:
        """Lock the folder. Raises UserError if another run has locked it, or if it is not writable."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.check()
        except OSError as error:
            raise UserError(
                f"cannot write to {self._named}: {error.strerror}; choose a writable directory with free space"
            ) from error

    def check(self) -> None:
        """Lock the folder again if this run has lost the lock. Raises UserError if another run has locked it."""
        while not self._is_locked():
            self.release()

    def release(self) -> None:
        """Close the file, which releases the lock if no other process shares it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _is_locked(self) -> bool:
        """Try to lock the file. Returns False if the path does not lead to this file any more."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = printable(os.pread(self._descriptor, 1000, 0).decode(errors="replace"))
            if _later_attempt(holder, _own_name()):
                self._path.unlink(missing_ok=True)
                return False
            raise UserError(
                f"{self._named} is in use by {holder or 'an unknown run'}, and two runs would overwrite each other's "
                f"checkpoints: wait until that run has ended, stop it, or use another directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            warn_once(f"warning: {self._named} is on a file system without locks, {_UNGUARDED}")
            return True
        try:
            same = os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:
            return False
        if same:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _own_name().encode(), 0)
        return same


def _own_name() -> str:
    job = f"{os.environ.get('SLURM_JOB_ID', '')} {os.environ.get('SLURM_CLUSTER_NAME', '')}".strip()
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    of_job = f"SLURM job {job}, attempt {attempt}, " if "SLURM_JOB_ID" in os.environ else ""
    return f"process {os.getpid()} on {socket.gethostname()} ({of_job}since {time.strftime('%Y-%m-%d %H:%M:%S')})"


def _later_attempt(before: str, now: str) -> bool:
    """Whether `now` names a later attempt of the SLURM job that `before` names."""
    first, second = _ATTEMPT.search(before), _ATTEMPT.search(now)
    return first is not None and second is not None and first[1] == second[1] and int(first[2]) < int(second[2])


_claimed: SaveFolder | None = None
"""The folder that this run has claimed, which only rank 0 locks; None if the run has claimed no folder."""


def saves_to(args: Arguments) -> tuple[str, str] | None:
    """Return the option that names the folder for a run's checkpoints, and the folder; None if the run saves nothing.

    When a run converts a checkpoint, Megatron sets `--save` only after it has loaded the checkpoint, so the folder
    follows from --ckpt-convert-save.
    """
    if args.ckpt_convert_format is not None:
        return "--ckpt-convert-save", os.path.join(args.ckpt_convert_save, args.ckpt_convert_format)
    return None if args.save is None or args.skip_train else ("--save", args.save)


def claim(option: str, folder: str) -> None:
    """Claim for this run the folder that `option` names. All ranks must call this function.

    Object storage (`SCHEME://`) has no locks. Raises UserError on every rank if another run uses the folder.
    """
    global _claimed
    if "://" not in folder:
        _claimed = SaveFolder(Path(folder), option)
        agreed(_claimed.take)
    elif torch.distributed.get_rank() == 0:
        warn_once(f"warning: {option} {folder} is object storage, which has no locks, {_UNGUARDED}")


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


def _only_where_claimed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if _claimed is not None:
            agreed(_claimed.check)
        return original(*args, **kwargs)

    return save_checkpoint
