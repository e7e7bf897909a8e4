"""Lets ranks compare values before Megatron creates process groups. The ranks use the store of `torch.distributed`, to
which they connect anyway.

Without this comparison, ranks that were given different parallel sizes or backends would create different groups and
wait for each other until a timeout.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, distributed_c10d
from torch.distributed.rendezvous import rendezvous

from megatron_vp.errors import UserError
from megatron_vp.schedule.families import text_of_file

PATIENCE = timedelta(minutes=10)
"""Default limit on how long a rank waits for other ranks: the default of `--distributed-timeout-minutes`."""
_LEAVE_WITHIN_SECONDS = 10.0
_PIECE = 4 << 20
"""The schedule file's text is stored in pieces of this many bytes, because the store accepts at most 8 MiB at once."""
_SCHEDULE = "schedule"


def first_ranks_text(name: str) -> str:
    """Return rank 0's text of the schedule file `name`, because the file may differ or be missing on other nodes.

    If rank 0 was given a different name, this rank uses its own file, and `compare` will report the difference. Raises
    UserError if rank 0 cannot read its file.
    """
    rank, ranks = _place()
    if ranks == 1:
        return text_of_file(name)
    store = _store()
    if rank == 0:
        try:
            text = text_of_file(name)
        except UserError as error:
            _set(store, _SCHEDULE, {"name": name, "error": str(error)})
            _end_together(store, str(error))
        _set_text(store, name, text)
        return text
    said = _get(store, _SCHEDULE, PATIENCE)
    if "error" in said:
        _end_together(store, said["error"])
    try:
        text = text_of_file(name)
    except UserError:
        if said["name"] != name:
            raise
        return _text(store, said["pieces"])
    return text if said["name"] != name or said["digest"] == _digest(text) else _text(store, said["pieces"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def compare(own: dict[str, Any], verdict: Callable[[list[dict[str, Any]]], str], patience: timedelta) -> None:
    """Compare the ranks' values. Returns if all ranks have equal values or if the verdict is empty. Otherwise raises
    UserError on every rank.

    Args:
        own: JSON values by name.
        verdict: returns the error message for the values of all ranks, or "" if the difference does not matter. It is
            called on one rank if the values differ.
    """
    rank, ranks = _place()
    if ranks == 1:
        return
    store = _store()
    if rank == 0:
        _set(store, "facts", own)
        # If rank 0 was given no schedule file, this entry ends the wait of ranks that were given one.
        store.compare_set(_SCHEDULE, "", json.dumps({"name": None}))
    first = _get(store, "facts", patience)
    if first != own:
        _set(store, f"other {store.add('others', 1)}", {"rank": rank, "facts": own})
    if store.add("compared", 1) == ranks:  # The last rank to arrive compares the values of all ranks.
        found = [_get(store, f"other {number + 1}", patience) for number in range(store.add("others", 0))]
        others = {each["rank"]: each["facts"] for each in found}
        store.set("verdict", verdict([others.get(each, first) for each in range(ranks)]) if others else "")
    store.wait(["verdict"], patience)
    if said := store.get("verdict").decode():
        _end_together(store, said)


def _place() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _store() -> Store:
    return PrefixStore(f"megatron_vp/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", meeting_point())


def meeting_point(patience: timedelta = PATIENCE) -> Store:
    """Return the launcher's store, or a store that rank 0 serves. This module keeps a reference to the store, because
    rank 0's server stops when its process drops the last reference.
    """
    global _met
    if distributed_c10d.is_initialized():
        return distributed_c10d._get_default_store()
    if _met is None:
        _met, _, _ = next(iter(rendezvous("env://", timeout=patience)))
    return _met


_met: Store | None = None


def _set(store: Store, key: str, value: dict[str, Any]) -> None:
    store.set(key, json.dumps(value))


def _get(store: Store, key: str, patience: timedelta) -> dict[str, Any]:
    store.wait([key], patience)
    return json.loads(store.get(key))


def _set_text(store: Store, name: str, text: str) -> None:
    packed = zlib.compress(text.encode())
    pieces = [packed[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{_SCHEDULE} {number}", piece)
    _set(store, _SCHEDULE, {"name": name, "digest": _digest(text), "pieces": len(pieces)})


def _text(store: Store, pieces: int) -> str:
    return zlib.decompress(b"".join(store.get(f"{_SCHEDULE} {number}") for number in range(pieces))).decode()


def _end_together(store: Store, line: str) -> NoReturn:
    """Raise UserError with `line`. Rank 0 may serve the store, so it first lets the other ranks read the line."""
    rank, ranks = _place()
    heard, deadline = store.add("heard", 1), time.monotonic() + _LEAVE_WITHIN_SECONDS
    while rank == 0 and heard < ranks and time.monotonic() < deadline:
        time.sleep(0.05)
        heard = store.add("heard", 0)
    raise UserError(line)
