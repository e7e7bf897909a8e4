"""Checks what Triton needs when it first runs: a C compiler, Python's headers, and a folder for its cache.

Triton compiles a small C library when it first uses a device, and each kernel when the kernel is first launched. Triton
keeps the library and the kernels in one cache folder, which all ranks of a node read and write.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs"),
    *("lustre", "gpfs", "beegfs", "panfs", "wekafs", "orangefs", "pvfs2", "vastnfs", "quobyte", "daos"),
}
_OCTAL = re.compile(r"\\([0-7]{3})")
"""An escape sequence in /proc/self/mounts, which stands for a space or another special character."""
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll", "fuseblk"}


def c_compiler() -> str | None:
    """The compiler that Triton would use, or None. Raises OSError if CC is not a command, or Python.h is missing."""
    chosen = os.environ.get("CC")
    found = shutil.which(chosen.split()[0]) if chosen else shutil.which("gcc") or shutil.which("clang")
    if chosen and found is None:
        raise OSError(f"CC={chosen} is not a command on this machine: unset CC, or set it to a C compiler")
    headers = Path(sysconfig.get_paths()["include"])
    if found is not None and not (headers / "Python.h").is_file():
        raise OSError(f"{found} exists, but {headers}/Python.h does not: install Python's headers (python3-dev)")
    return found


def cache_folder() -> Path:
    """Triton's cache folder, which may not exist yet."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache").absolute()


def file_system(folder: Path) -> str | None:
    """The type of the file system on which a folder exists or would be created; None if unknown."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    above = []
    for _, point, kind, *_ in map(str.split, lines):
        mounted = Path(_OCTAL.sub(lambda number: chr(int(number[1], 8)), point))
        if folder.resolve().is_relative_to(mounted):
            above.append((len(mounted.parts), len(above), kind))  # A later mount on the same path hides earlier ones.
    return max(above)[-1] if above else None


def is_network(kind: str | None) -> bool:
    """Whether `kind` is the type of a network file system. Unknown FUSE types count as network file systems."""
    return kind in _NETWORK or (kind is not None and kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def cache() -> str:
    """Describe Triton's cache and its file system. Raises OSError if the cache is on a network file system."""
    folder = cache_folder()
    kind = file_system(folder)
    if is_network(kind):
        raise OSError(f"{folder} is on a network file system ({kind})")
    return f"{folder} ({kind or 'file system unknown'})"
