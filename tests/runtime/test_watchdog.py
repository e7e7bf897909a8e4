"""A process that sits in a backend's code, where no Python signal handler runs, says where it is and ends."""

import re
import signal
import subprocess
import sys

import pytest

WAITING = """
import ctypes
from megatron_vp.runtime.progress import Progress
from megatron_vp.runtime.watchdog import Watchdog
from megatron_vp.schedule.instructions import Channel, Message, Wait

progress = Progress((4, 5, 6), 1)
progress.iteration = 3
progress.instruction = Wait(Message(Channel.GRADIENT, 7, 2, 1, 2, 1))
Watchdog(progress, 100, {limit}).start()
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
print("waiting", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
"""


@pytest.mark.parametrize(
    ("limit", "sent", "status", "said"),
    [(100, signal.SIGTERM, 143, r" when it was told to end \(SIGTERM\)"), (1, None, 1, r" \(\d s\)")],
)
def test_a_waiting_process_says_for_what_and_ends(limit, sent, status, said):
    code = WAITING.format(limit=limit)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as it:
        it.stdout.readline()
        if sent:
            it.send_signal(sent)
        _, errors = it.communicate(timeout=50)
    assert it.returncode == status
    assert re.fullmatch(f"error: rank 5 waited for B of microbatch 7 from rank 6{said}", errors.strip())
