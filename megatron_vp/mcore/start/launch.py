"""Runs a Megatron script with the plug-in: sets the environment, applies patches and reports input errors."""

from __future__ import annotations

import errno
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron_vp.errors import PeerLost, UserError, at_last, printable, say, storage_failure
from megatron_vp.jobs.command_line import CPU, asks_for_help
from megatron_vp.jobs.shipped import TRAINING_SCRIPT
from megatron_vp.mcore.start.last_line import refuse_together
from megatron_vp.mcore.storage import attempt

_MAY_PASS = {errno.EIO, errno.ESTALE}
"""Storage errors that might not recur in a job's next attempt."""
_OF_DEVICES = re.compile(r"CUDA|CUDNN|CUBLAS|NCCL|out of memory", re.IGNORECASE)
_INPUT_ERRORS = (AssertionError, ImportError, NotImplementedError, OSError, ValueError)
"""Types of errors with which Megatron and other libraries reject input; other types may also be bugs."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors into one line on standard error and an exit status: 2 for a UserError, 130 for Ctrl-C, and 1 for a
    lost peer, a storage error, or a checkpoint that cannot be written or read.

    Before training starts, every error has status 2, because each attempt would end with it, unless it may be the fault
    of a device, a peer, the network or the storage.

    Once ranks are connected, a failed process ends without running destructors, because those of its process groups
    would wait for peers, which would wait for this process to exit. A process that ends normally destroys its process
    groups, because Python aborts if their threads outlive the interpreter.
    """
    try:
        yield
        _disconnect()
    except UserError as error:
        refuse(str(error), 2)
    except SystemExit as end:
        if not end.code:
            _disconnect()
        raise
    except KeyboardInterrupt:
        # Ctrl-C interrupts every rank. Only rank 0 prints a line, and no rank waits for its peers.
        if os.environ.get("RANK", "0") == "0":
            at_last(lambda: say("stopped by Ctrl-C (SIGINT), which saves nothing"))
        _exit(128 + signal.SIGINT)
    except BaseException as error:  # torch's CheckpointException does not derive from Exception.
        status = 2 if _before_training(error) and not _may_pass(error) else 1
        refused, trace = storage_failure(error), partial(sys.excepthook, type(error), error, error.__traceback__)
        if (refused and not _connected()) or (status == 2 and isinstance(error, Exception)):
            if not isinstance(error, _INPUT_ERRORS):
                at_last(trace)
            refuse(line_of(error), status)
        try:
            line = _known_line(error)
            at_last(trace if line is None else partial(say, f"error: {line}"))
        finally:
            _exit(status)


@contextmanager
def as_one_line() -> Iterator[None]:
    """Raise UserError in place of any error of a job's start, with the line that the start would print."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(line_of(error)) from error


def line_of(error: BaseException) -> str:
    """Describe an error of a start in one line, with the function that raised it."""
    refused = storage_failure(error)
    said = printable(str(error)) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    paths = "; check the paths of this job" if refused else ""
    hub = "; set HF_HUB_OFFLINE=0 to look up names on the Hub" if "huggingface.co" in said else ""
    return f"{refused or f'{type(error).__name__}: {said}'} (in {_place(error)}){paths}{hub}"


def is_raised_on_purpose(error: BaseException) -> bool:
    """Whether a library raised an error to reject its input, rather than by accident."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return isinstance(error, _INPUT_ERRORS) or line.startswith("raise ")


def _before_training(error: BaseException) -> bool:
    """Whether `error` was raised before the first iteration. Loops other than Megatron's are not recognized, so all
    their errors count as later ones as soon as ranks are connected.
    """
    if not _connected():
        return True
    variables = sys.modules.get("megatron.training.global_vars")
    megatrons = any(frame.name == "pretrain" for frame in traceback.extract_tb(error.__traceback__))
    # Megatron sets this argument just before it starts to train.
    return megatrons and variables is not None and not hasattr(variables.get_args(), "curr_iteration")


def _may_pass(error: BaseException) -> bool:
    """Whether an error may not recur in the job's next attempt, perhaps on other nodes."""
    if isinstance(error, OSError):
        return error.errno in _MAY_PASS or isinstance(error, ConnectionError | TimeoutError)
    if isinstance(error, RuntimeError):
        from megatron_vp.runtime.progress import lost_peer

        return isinstance(error, PeerLost) or lost_peer(error) is not None or bool(_OF_DEVICES.search(str(error)))
    # A CheckpointException holds the errors of all ranks.
    return isinstance(error, MemoryError) or any(
        _may_pass(reason) for reason, _ in getattr(error, "failures", {}).values()
    )


def refuse(said: str, status: int) -> NoReturn:
    """Print one line for the whole job and exit. If ranks are connected, this rank waits only briefly for the other
    ranks, because they either refuse at the same time or already wait for this rank.
    """
    refuse_together(said, seconds=3.0 if _connected() else 10.0)
    _exit(status)


def _connected() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _disconnect() -> None:
    if _connected():
        sys.modules["torch"].distributed.destroy_process_group()


def _exit(status: int) -> NoReturn:
    if status == 2:
        attempt.remove("retry")
    if _connected():
        from megatron_vp.runtime.watchdog import end_process

        end_process(status)
    # If output cannot be flushed, `sys.exit` would try again, fail, and change the exit status.
    if not at_last(lambda: None):
        os._exit(status)
    sys.exit(status)


def _known_line(error: BaseException) -> str | None:
    """One line that describes an error of a checkpoint, an error of the storage, or where this rank was waiting for a
    lost or silent peer; None for any other error.
    """
    from torch.distributed.checkpoint import CheckpointException

    from megatron_vp.runtime.progress import lost_peer
    from megatron_vp.runtime.watchdog import others_of_a_lost_peer

    rank = f"rank {os.environ.get('RANK', '?')}"
    if isinstance(error, CheckpointException):  # Only rank 0 can name the rank that failed.
        failed = [f"rank {number}: {_failure(reason)}" for number, (reason, _) in error.failures.items()]
        where = f" on {'; '.join(failed)}" if failed else "; the message of rank 0 names the rank that failed"
        return f"{rank} abandoned the checkpoint, because the {error.args[0]} step failed{where}"
    if refused := storage_failure(error):
        return f"{rank} failed in {_place(error)}: {refused}"
    if isinstance(error, PeerLost):
        return str(error)
    if reason := lost_peer(error):
        waited = f"{rank} was waiting in {_place(error)}, outside the pipeline schedule"
        return f"{waited}: {reason}{others_of_a_lost_peer()}"
    return None


def _failure(reason: BaseException) -> str:
    if not isinstance(reason, KeyError):
        return str(reason).strip().partition("\n")[0]
    other = (
        "; the run that saved it had another optimizer, distributed it differently, or had frozen this parameter: add "
        "--no-load-optim to start with a fresh optimizer"
    )
    name = str(reason.args[0]).partition(" ")[0]
    return f"the checkpoint has no {name}{other * name.startswith('optimizer.')}"


def _place(error: BaseException) -> str:
    """The innermost function in the traceback that belongs neither to torch nor to Python's standard library."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if not _foreign(frame.filename)][-1]
    return f"{frame.name} ({frame.filename}:{frame.lineno})"


def _foreign(file: str) -> bool:
    standard = file.startswith(f"{_STANDARD_LIBRARY}{os.sep}") and "site-packages" not in file
    return f"{os.sep}torch{os.sep}" in file or standard or file.startswith("<")


def prepare() -> None:
    """Prepare this process for a Megatron script, whose arguments are in `sys.argv`.

    Call this function before importing Megatron. It removes `--cpu` from `sys.argv`. It exits with status 2 and a
    one-line message, without patching anything, if the process was not started by a launcher, if Megatron's version is
    not supported, or if an essential patch does not fit the installed Megatron.
    """
    with one_line_errors():
        _require_launcher(sys.argv[0])
        patch_megatron(sys.argv)


def run_script(script: str, arguments: list[str]) -> None:
    """Run a user's Megatron script as `__main__` under the plug-in.

    The plug-in's own script can be given by its name alone, from any folder. Raises UserError if the file does not
    exist.
    """
    with one_line_errors():
        if script == TRAINING_SCRIPT.name and not Path(script).exists():
            script = str(TRAINING_SCRIPT)
        sys.argv = [script, *arguments]
        _require_launcher(f"--no-python megatron-vp run {script}")
        if not Path(script).is_file():
            raise UserError(
                f"{script} is not a file: give the path of a Megatron training script, or pretrain_gpt_vp.py"
            )
        # Let the script import modules from its own folder, as if Python had started it.
        sys.path.insert(0, str(Path(script).resolve().parent))
        prepare()
        with attempt.noting_the_end():
            runpy.run_path(script, run_name="__main__")


def _require_launcher(command: str) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and not asks_for_help(sys.argv):
        raise UserError(
            f"the environment does not set {', '.join(missing)}: start one process per rank, for example with "
            f"`torchrun --nproc-per-node 4 {command} ...`"
        )
    rank, ranks = (os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE"))
    # Ranks would wait forever for peers.
    if not missing and not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        said = f"RANK={printable(rank, 40)}, WORLD_SIZE={printable(ranks, 40)}"
        raise UserError(f"no rank has {said}: correct these variables, or let the launcher set them")


def patch_megatron(argv: list[str]) -> None:
    """Check this run's patches against the installed Megatron, and apply the ones needed before arguments are parsed.

    Also reads the schedule file that the run names. Removes `--cpu` from `argv`. Raises UserError, without patching
    anything, if an essential patch does not fit or the schedule file cannot be used.
    """
    # Torch is imported only here, and Megatron only after the environment is set, so that mistakes in the launch are
    # reported before these slow imports.
    from megatron_vp.mcore import patch_table, patches, settled
    from megatron_vp.mcore.platform import installed
    from megatron_vp.mcore.platform.flags import prepare_environment, quiet_fallback_warnings, uses_cpu

    cpu = uses_cpu(argv)
    if CPU in argv:
        argv[:] = [word for word in argv if word != CPU]
        os.environ["MEGATRON_VP_CPU"] = "1"
    prepare_environment(cpu)
    # Without a network, each rank would try for a minute to look up a tokenizer's name on the Hugging Face Hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_fallback_warnings()
    if cpu:
        installed.hide_what_needs_a_gpu()
    installed.here()
    patches.installed_version()
    early = settled.early_arguments(argv[1:])
    settled.begin(early.pipeline_schedule)
    patch_table.require_fit(early)
    patch_table.apply(early, early=True)
