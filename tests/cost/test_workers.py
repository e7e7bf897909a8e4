"""Test that no worker process of a command outlives the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_vp.cost.planning.workers import asked_process
from megatron_vp.errors import UserError
from tests.harness.broken import alive

PARENT = """
import os, sys, time
from megatron_vp.cost.planning.workers import asked_process, worker_pool

sys.modules.update(LOADED)

def prepare():
    pass

def answer():
    return os.getpid()

def work():
    while True:
        pass

if __name__ == "__main__":
    with asked_process(prepare, answer) as ask, worker_pool(2) as pool:
        print(ask(), *{pool.submit(os.getpid).result() for _ in range(20)}, flush=True)
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
    assert workers <= set(children) and len(workers) >= 2 and len(children) == 3 + bool(loaded)
    deadline = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [child for child in children if alive(child)]
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left


def _nothing():
    pass


def _half(number):
    return number // 2 if number else os._exit(3)


def test_a_process_is_asked_until_it_ends():
    with asked_process(_nothing, _half) as ask:
        assert [ask(8), ask(6)] == [4, 3]
        with pytest.raises(UserError, match="exited with code 3"):
            ask(0)
