"""Test the progress reports of a rank: marks on the device, and what counts as a lost peer."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch.distributed as dist

from megatron_vp.runtime import watchdog
from megatron_vp.runtime.progress import FINISHING, Progress, lost_peer
from megatron_vp.schedule.instructions import Load, Loss, Post, Run, Wait
from megatron_vp.schedule.passes import Pass, PassKind
from megatron_vp.schedule.transfers import CONTENT, Channel, Collective, CollectiveKind, Message


def wait(microbatch: int) -> Wait:
    return Wait(Message(Channel.ACTIVATION, microbatch, 0, 1, 0, 1))


class Device:
    """Runs `lag` waits behind the host; counts iterations as its last wait is over."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.issued = 0
        self.askers: set[threading.Thread] = set()
        self._ends: list[int] = []

    def mark(self) -> Mark:
        self.issued += 1
        return Mark(self, self.issued)

    @property
    def passed(self) -> int:
        return self.issued - self.lag

    def add(self) -> None:
        self._ends.append(self.issued)

    def count(self) -> int:
        return sum(end <= self.passed for end in self._ends)


class Mark:
    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number

    def done(self) -> bool:
        self._device.askers.add(threading.current_thread())
        return self._number <= self._device.passed


def run(progress: Progress, device: Device, waits: int, seen: list | None = None, seconds: float = 0) -> None:
    """One iteration of a program that waits and does something else, for `seconds`, in turn."""
    steps = [step for microbatch in range(waits) for step in (wait(microbatch), Loss(microbatch))]

    def note(instruction: Wait | Loss) -> None:
        if isinstance(instruction, Wait):
            progress.mark(instruction, device.mark())
        time.sleep(seconds)
        if seen is not None:
            seen.append((instruction, progress.place()[1], progress.behind, progress.sentence()))

    with progress.schedule():
        for step in steps:
            progress.at(step)
            note(step)
        progress.at(FINISHING)


def test_the_first_wait_that_the_device_has_not_passed_is_the_place_of_a_host_that_waits():
    device, seen = Device(lag=2), []
    run(Progress((0, 1), 1, device), device, 6, seen)
    behind = [behind.operation.microbatch for instruction, _, behind, _ in seen if isinstance(instruction, Loss)]
    assert behind == [0, 0, 1, 2, 3, 4], "the two last waits of the host are ahead of the device"
    places = [place.operation.microbatch for instruction, place, _, _ in seen if isinstance(instruction, Wait)]
    assert places == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("stalled", "said"),
    [
        (Load(3), "was reading the data of microbatch 3"),
        (Run(Pass(PassKind.B, 3)), "was in pass B of microbatch 3"),
        (Loss(3), "was in the loss function of microbatch 3"),
    ],
    ids=["data", "pass", "loss function"],
)
def test_a_host_that_stalls_ahead_of_its_device_names_what_it_is_at(stalled, said):
    """The device is idle, or will be: nobody asks it for its marks while the host stands still."""
    device = Device(lag=2)
    progress = Progress((0, 1), 1, device)
    run(progress, device, 3)
    progress.at(stalled)
    assert progress.place() == (1, stalled)
    ahead = ", ahead of its device, last seen waiting for F of microbatch 1 from rank 0"
    assert progress.sentence() == f"rank 1 {said}{ahead}"
    device.lag = 0
    progress.at(stalled)
    assert progress.sentence() == f"rank 1 {said}"
    progress.at(wait(5))
    assert progress.sentence() == "rank 1 waited for F of microbatch 5 from rank 0"


def test_no_mark_is_kept_that_the_device_has_passed_and_no_other_is_lost():
    device = Device(lag=3)
    progress = Progress((0, 1), 1, device)  # and no watchdog
    for _ in range(5):
        run(progress, device, 50)
        assert [mark._number for _, mark in progress._marks] == list(range(device.passed + 1, device.issued + 1))


def test_a_device_that_stands_still_is_noticed_after_the_host_has_left_the_schedule():
    device = Device(lag=2)
    progress = Progress((0, 1), 1, device)
    run(progress, device, 4)
    assert progress.sentence() == "rank 1 waited for F of microbatch 2 from rank 0"
    device.lag = 0  # nobody looks at marks from here on
    assert progress.place()[1] is None
    assert progress.sentence() == "rank 1 was outside the pipeline schedule"
    device.lag = 1
    run(progress, device, 4)
    assert progress.sentence() == "rank 1 waited for F of microbatch 3 from rank 0"


def test_only_the_main_thread_asks_the_device(monkeypatch):
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "_pipe_of_sigterm", lambda: None)
    device, never = Device(lag=1), float("inf")
    progress = Progress((0, 1), 1, device)
    watchdog.Watchdog(progress, never, never).start()
    for _ in range(3):
        run(progress, device, 3, seconds=0.02)
        time.sleep(0.05)
    progress.sentence()
    assert device.askers == {threading.main_thread()}


@pytest.mark.parametrize("channel", Channel)
def test_a_wait_for_a_message_names_what_comes_and_from_whom(channel):
    progress = Progress((4, 5, 6), 0)
    progress.at(Wait(Message(channel, 3, 5, 5, 2, 0)))
    said = re.fullmatch(r"rank 4 waited for (.+) of microbatch 3 from rank 6", progress.sentence())
    assert said and said[1] == CONTENT[channel]
    progress.at(Post(Message(channel, 3, 5, 5, 2, 0)))
    assert progress.sentence() == f"rank 4 was starting the transfer of {CONTENT[channel]} of microbatch 3 from rank 6"


@pytest.mark.parametrize("kind", CollectiveKind)
def test_a_wait_for_a_collective_names_it_and_whom_it_waits_for(kind):
    progress = Progress((4, 5, 6), 0)
    progress.at(Wait(Collective(kind, 3, 1)))
    sources = {"TOKENS": "ranks 4 and 6", "C0": "rank 5", "LOSS_GRAD": "rank 5", "EMBED_GRAD": "rank 5"}
    awaited = f"{kind} of microbatch 3 from {sources.get(kind, 'all ranks')}"
    assert progress.sentence() == f"rank 4 waited for {awaited}"
    progress.at(FINISHING)
    assert progress.sentence() == "rank 4 waited for its last messages to be received"


OLDER = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {result}, NCCL version 2.28.9"
"""As ProcessGroupNCCL puts it; what NCCL noticed last follows, and with TORCH_SHOW_CPP_STACKTRACES a stack."""
STACK = "Exception raised from checkForNCCLErrorsInternal at /pytorch/ProcessGroupNCCL.cpp:2 (most recent call first):"
SYSTEM = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
REMOTE = "remote process exited or there was a network error"
CUDA = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
USAGE = "invalid usage (run with NCCL_DEBUG=WARN for details)"
ARGUMENT = "invalid argument (run with NCCL_DEBUG=WARN for details)"


def older(result: str, meaning: str, cause: str) -> dist.DistBackendError:
    return dist.DistBackendError(f"{OLDER.format(result=result)}\n{meaning}\nLast error:\n{cause}\n{STACK}\nframe #0")


def newer(failed: str, result: str, cause: str) -> RuntimeError:
    return RuntimeError(f"{failed}: {result} \nNCCL Last Error: {cause}")


CLOSED = "socketProgress: Connection closed by remote peer node7<45123>"
LOST = [
    (dist.DistBackendError("NCCL operation timed out"), "NCCL operation timed out"),
    (newer("NCCL Async Error", REMOTE, CLOSED), f"NCCL Async Error: {REMOTE} ({CLOSED})"),
    (
        older(REMOTE, "ncclRemoteError: A call failed possibly due to a network error or a remote process.", CLOSED),
        f"{OLDER.format(result=REMOTE)} ({CLOSED})",
    ),
    (
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3820"
        ),
        "Connection closed by peer [127.0.0.1]:3820",
    ),
    (dist.DistNetworkError("The client socket has timed out. More"), "The client socket has timed out"),
]
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device ac000"
LOCAL = [
    older(CUDA, "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 2 'out of memory'"),
    newer("NCCL Async Error", CUDA, "Cuda failure 2 'out of memory'"),
    newer("NCCL GroupEnd failed", USAGE, DUPLICATE),
    newer("NCCL Broadcast failed", ARGUMENT, ""),
]
"""Errors of NCCL whose cause is on this rank."""
DEFECTS = [
    RuntimeError("Unsupported tensor data type for NCCL"),
    RuntimeError("CUDA error: an illegal memory access was encountered\nNCCL may have failed"),
    ValueError("--nccl-communicator-config-path failed: no NCCL option"),
    RuntimeError("ProcessGroupNCCL not initialized, which is an error"),
    KeyError("NCCL error"),
]


@pytest.mark.parametrize(("error", "said"), LOST, ids=lambda value: type(value).__name__)
def test_a_lost_peer_is_known_by_the_error_of_the_backend(error, said):
    assert lost_peer(error) == said


@pytest.mark.parametrize("error", LOCAL, ids=lambda error: re.sub(r"\W+", "_", str(error))[-60:])
def test_an_error_of_nccl_with_a_cause_on_this_rank_keeps_its_traceback(error):
    assert lost_peer(error) is None
    with pytest.raises(type(error)) as raised, Progress((0, 1), 1).schedule():
        raise error
    assert raised.value is error and raised.value.__notes__ == ["rank 1 was outside the pipeline schedule"]


@pytest.mark.parametrize("error", DEFECTS, ids=str)
def test_other_errors_are_defects(error):
    assert lost_peer(error) is None
