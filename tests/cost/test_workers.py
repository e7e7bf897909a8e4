"""Test that no worker process of a command outlives the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.broken import alive

PARENT = """
import os, sys, time
from megatron_vp.cost.planning.workers import worker_pool

sys.modules.update(LOADED)

def work():
    while True:
        pass

if __name__ == "__main__":
    with worker_pool(2) as pool:
        print(*{pool.submit(os.getpid).result() for _ in range(20)}, flush=True)
        pool.submit(work)  # one is busy, the others wait
        time.sleep(60)
"""


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("loaded", ["", "torch=None"], ids=["copies", "from nothing"])
def test_workers_end_when_their_parent_is_killed(tmp_path, loaded):
    script = tmp_path / "parent.py"  # workers that start from nothing import it, so it has to be a file
    script.write_text(PARENT.replace("LOADED", loaded))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        workers = set(map(int, parent.stdout.readline().split()))
        children = _children(parent.pid)
        parent.kill()
    # The resource tracker of multiprocessing is started only for workers that start from nothing.
    assert workers <= set(children) and workers and len(children) == 2 + bool(loaded)
    deadline = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [child for child in children if alive(child)]
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left
