"""Run SLURM on this machine, in a folder. SLURM sees one node of eight CPUs and four GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
GPUS = 4
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
# A job that is requeued waits for as long as its old credential lives.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
# A node that is busy answers late. A signal that timed out is sent again, and ends the same step of the next attempt.
MessageTimeout=60
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
NodeName=localhost Sockets=8 CoresPerSocket=1 ThreadsPerCore=1 Gres=gpu:{gpus} State=UNKNOWN
# A job in `urgent` has the others requeued, half a minute after they were told.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=localhost Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=localhost PriorityTier=2
"""


def unavailable() -> str | None:
    """Why no cluster can be started here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "SLURM's daemons are started as root"


class Cluster:
    """A running cluster; a context manager. Jobs run in `work`, which looks like the repository, with this Python."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen] = []
        self.work = folder / "work"
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "MEGATRON_VP_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Cluster:
        for name in ("work", "munge", "state", "spool"):
            (self._folder / name).mkdir()
        for name in ("scripts", "configs", "pretrain_gpt_vp.py"):
            (self.work / name).symlink_to(ROOT / name)
        munge = {name: self._folder / "munge" / name for name in ("socket", "key", "pid", "log", "seed")}
        munge["key"].write_bytes(os.urandom(1024))
        munge["key"].chmod(0o600)
        controller, node = _free_ports(2)
        text = CONFIGURATION.format(folder=self._folder, controller_port=controller, node_port=node, gpus=GPUS)
        (self._folder / "slurm.conf").write_text(text)
        for number in range(GPUS):
            (self._folder / f"gpu{number}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-{GPUS - 1}]\n")
        try:
            # --force: others may write to a folder above the temporary one.
            self._start("munged", "--foreground", "--force", f"--socket={munge.pop('socket')}", *_as_files(munge))
            self.until(lambda: (self._folder / "munge" / "socket").exists(), 60, "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D", "-N", "localhost")
            self.until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), 60, "an idle node")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run("scancel", "--user=root")
            self.until(lambda: not self.run("squeue", "--noheader", "--format=%i"), 60, "the end of all jobs")
        finally:
            self._stop()

    def submit(self, *command: str | Path, **environment: str) -> str:
        """Submit with `sbatch COMMAND`; returns the job's number."""
        words = ["sbatch", "--parsable", f"--output={self._folder / '%j.out'}", *map(str, command)]
        done = self._call(words, {**self._environment, **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, seconds: float) -> dict[str, str]:
        """The state of a job that has ended for good."""
        self.until(lambda: self.state(job)["JobState"] in FINAL_STATES, seconds, f"the end of job {job}", job)
        return self.state(job)

    def output(self, job: str) -> str:
        """What the batch script of a job has printed so far."""
        path = self._folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def run(self, *command: str) -> str:
        """What a command prints that talks to this cluster."""
        return self._call(command, self._environment).stdout.strip()

    def until(self, condition: Callable[[], bool], seconds: float, what: str, job: str | None = None) -> None:
        """Wait for a condition; fails with the output of `job` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            said = self.output(job) if job is not None else ""
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{said}"
            time.sleep(0.1)

    def _start(self, program: str, *options: str) -> None:
        with (self._folder / f"{program}.out").open("w") as output:
            daemon = subprocess.Popen(
                [program, *options], env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
        self._daemons.append(daemon)

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(timeout=30)

    def _call(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=environment, cwd=self.work, capture_output=True, text=True, check=False, timeout=60
        )


def _as_files(paths: dict[str, Path]) -> list[str]:
    return [f"--{name}-file={path}" for name, path in paths.items()]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
