"""Helpers for a standard error stream that cannot be written to, and for processes that should have ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from megatron_vp import errors

BROKEN = ["full", "reader gone", "nobody reads", "closed", "closed at the start"]
"""What can be wrong with standard error."""


def break_stderr(how: str | None) -> None:
    """Break this process's standard error for good; None leaves it as it is."""
    if how == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    elif how == "nobody reads":  # and another thread sits in a write
        errors._PATIENCE_SECONDS = 1
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(65536))
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
        threading.Thread(target=print, args=("stuck",), kwargs={"file": sys.stderr, "flush": True}, daemon=True).start()
        time.sleep(0.2)
    elif how == "reader gone":
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(reader)
    elif how == "closed":
        sys.stderr.close()
    elif how == "closed at the start":
        os.close(2)
        sys.stderr = None


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
