"""Test scripts/slurm on a real SLURM: ranks, requeueing, and its limits. Most jobs run a stand-in for training."""

import os
import re
import shutil
from pathlib import Path

import pytest

from megatron_vp.jobs.shipped import BATCH_FILES

PRETRAIN = "scripts/slurm/pretrain.sbatch"
QUICKSTART = ("configs/quickstart.yaml", "--config", "configs/data/mock.yaml")
TINY = (
    *("--num-layers=4", "--hidden-size=32", "--seq-length=16", "--max-position-embeddings=16", "--vocab-size=512"),
    *("--micro-batch-size=2", "--global-batch-size=8", "--lr-warmup-iters=0", "--eval-interval=1000", "--cpu"),
)

STAND_IN = """#!/usr/bin/env bash
# Checks pass; a rank says who it is and does what the test wants. It prints what Megatron prints and tells the batch
# script what it has achieved as training does.
if [[ $3 == check ]]; then {check}; fi
saved() {{
    echo "  [2026-01-01] successfully saved checkpoint from iteration       5 to out"
    rm -f "$MEGATRON_VP_ATTEMPT/unsaved"
}}
stopped() {{ told=yes; echo "[exiting program after receiving SIGTERM.] datetime: 2026-01-01 "; }}
trap 'if [[ $? == 0 && ! $told ]]; then rm -f "$MEGATRON_VP_ATTEMPT/unfinished"; fi' EXIT
echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, meets at $MASTER_ADDR:$MASTER_PORT: $*"
{behaviour}
"""

FIRST_ATTEMPT = "[[ ! $SLURM_RESTART_COUNT ]]"
OBEY = "trap 'saved; stopped; exit 0' TERM; for _ in {1..3000}; do sleep 0.1; done"


@pytest.fixture
def stand_in(tmp_path):
    """Makes a Python whose training does `behaviour` in bash, and its checks `check`."""

    def make(behaviour: str = "true", check: str = "exit 0") -> str:
        path = tmp_path / "python"
        path.write_text(STAND_IN.format(behaviour=behaviour, check=check))
        path.chmod(0o755)
        return str(path)

    return make


def logs(cluster, job: str, attempt: int = 0, place: Path | None = None) -> list[str]:
    folder: Path = (place or cluster.work) / "runs" / "slurm" / job / f"attempt_{attempt}"
    return [path.read_text() for path in sorted(folder.glob("rank_*.log"))]


def test_trains(cluster):
    """On two ranks: `test_ranks_know_their_place` has one for each GPU, and every real rank starts for seconds."""
    # A loader's workers ignore the SIGTERM that ends them elsewhere: the job must not wait for them.
    flags = (*TINY, "--pipeline-model-parallel-size=2", "--vocab-parallel", "--train-iters=3", "--num-workers=1")
    job = cluster.submit("--ntasks-per-node=2", PRETRAIN, *QUICKSTART, *flags)
    assert cluster.wait(job, 500)["JobState"] == "COMPLETED", cluster.output(job)
    assert "2 ranks = 2 pipeline x 1 data; 4 microbatches; 1f1b, vocab-2" in cluster.output(job)
    ranks = logs(cluster, job)
    assert len(ranks) == 2
    assert re.findall(r"iteration +(\d+)/ +3 .* lm loss: [\d.E+]+ ", ranks[1]) == ["1", "2", "3"]


def test_ranks_know_their_place(cluster, stand_in):
    job = cluster.submit(PRETRAIN, "my.yaml", "--lr", "1", MEGATRON_VP_PYTHON=stand_in())
    assert cluster.wait(job, 120)["JobState"] == "COMPLETED", cluster.output(job)
    port = 15000 + int(job)
    cache = Path(f"/tmp/triton-{os.environ.get('USER', os.getuid())}-{job}")
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.rmdir()
    assert logs(cluster, job) == [
        f"rank {rank} of 4, {rank} of 4 here, meets at localhost:{port}: "
        "-m megatron_vp.pretrain --config my.yaml --exit-signal-handler --lr 1\n"
        for rank in range(4)
    ]


IMAGE = """#!/usr/bin/env bash
# Where srun has the pyxis plug-in, it takes these options.
for word in "$@"; do
    if [[ $word == --container-* ]]; then echo "$word" >>{said}; else words+=("$word"); fi
done
exec {srun} "${{words[@]}}"
"""


def test_own_scripts_run_in_an_image_from_any_folder(cluster, stand_in, tmp_path):
    """By the wheel's own batch files. The plug-in that starts images is stood in for."""
    place, image = tmp_path / "of mine", tmp_path / "bin" / "srun"
    place.mkdir()
    image.parent.mkdir()
    image.write_text(IMAGE.format(said=tmp_path / "said", srun=shutil.which("srun")))
    image.chmod(0o755)
    variables = {
        "MEGATRON_VP_SLURM": str(BATCH_FILES),
        "MEGATRON_VP_PYTHON": stand_in(),
        "MEGATRON_VP_CONTAINER_IMAGE": "nvcr.io#nvidia/pytorch:26.06-py3",
        "MEGATRON_VP_CONTAINER_MOUNTS": "/data:/data,/lustre:/x",
        "PATH": f"{image.parent}:{os.environ['PATH']}",
    }
    batch_file = BATCH_FILES / "pretrain.sbatch"
    job = cluster.submit(f"--chdir={place}", batch_file, "--script", "mine.py", "--lr", "1", **variables)
    assert cluster.wait(job, 120)["JobState"] == "COMPLETED", cluster.output(job)
    ranks = sorted((place / "runs" / "slurm" / job / "attempt_0").glob("rank_*.log"))
    assert [rank.read_text().partition(": ")[2] for rank in ranks] == [
        "-m megatron_vp run mine.py --exit-signal-handler --lr 1\n"
    ] * 4
    of_a_step = [
        "--container-image=nvcr.io#nvidia/pytorch:26.06-py3",
        f"--container-workdir={place}",
        f"--container-mounts={place}:{place},/data:/data,/lustre:/x",
    ]
    assert (tmp_path / "said").read_text().splitlines() == 2 * of_a_step, "of the check and of training"


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ((), {}, "megatron_vp: error: the job has no configuration file"),
        (("--script",), {}, "megatron_vp: error: --script needs a file"),
        (("my.yaml",), {"SLURM_HET_SIZE": "2"}, "error: this is a heterogeneous job, and srun would start ranks only"),
        (("my.yaml",), {"MASTER_PORT": "x[$(touch PWNED)]"}, "error: MASTER_PORT is 'x[$(touch PWNED)]' but must be"),
        (("my.yaml",), {"MEGATRON_VP_PYTHON": "/nowhere/python"}, "error: no Python at /nowhere/python"),
        pytest.param(("nowhere.yaml",), {}, "cannot read configuration file nowhere.yaml", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_start_ends_at_once(cluster, words, environment, said):
    job = cluster.submit(PRETRAIN, *words, **environment)
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    assert said in cluster.output(job)


def test_refused_input_is_not_tried_again(cluster, stand_in):
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in("exit 2"))
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")


def test_input_that_one_rank_refuses_is_not_tried_again_whatever_srun_says(cluster, stand_in):
    """SLURM kills the other ranks, so srun's status is theirs."""
    refuses = '[[ $RANK == 1 ]] && { rm "$MEGATRON_VP_ATTEMPT/retry"; exit 2; }; sleep 300'
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in(refuses))
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0"), cluster.output(job)


def test_a_suspected_gpu_is_named_and_the_job_does_not_return_to_it(cluster, stand_in):
    suspects = """echo "Rank $RANK, node n7, device 1, iteration #9: Possible persistent error!"; """
    behaviour = f'[[ $RANK == 2 ]] && {suspects}rm -f "$MEGATRON_VP_ATTEMPT/trusted"; exit 17'
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in(behaviour))
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "17:0", "0"), cluster.output(job)
    assert "so a GPU may be faulty: Rank 2, node n7, device 1; not requeued" in cluster.output(job)


DIES = "kill -KILL $$"


def test_a_check_that_dies_is_tried_again(cluster, stand_in):
    """As when a node is lost in it, or Python cannot be read over a slow file system."""
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in(check=f"{FIRST_ATTEMPT} && {DIES}; exit 0"))
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(job)
    assert "stopped with status 137; requeued" in cluster.output(job)


@pytest.mark.slow
def test_what_was_planted_where_a_job_will_log_is_neither_run_nor_overwritten(cluster, stand_in, tmp_path):
    """Counters that are programs, and links where the logs will be: jobs have numbers that can be guessed."""
    (tmp_path / "victim").write_text("precious")
    held = cluster.submit("--hold", PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in("echo a log; exit 7"))
    job = cluster.work / "runs" / "slurm" / held
    (job / "attempt_0").mkdir(parents=True)
    (job / "barren").write_text(f"BASH_VERSINFO[$(touch {tmp_path}/PWNED)0]")
    (job / "failed").write_text("08")
    for rank in range(4):
        (job / "attempt_0" / f"rank_{rank:04d}.log").symlink_to(tmp_path / "victim")
    (job / "attempt_1").symlink_to(tmp_path)
    (job / "attempt_2").write_text(f"$(touch {tmp_path}/PWNED)")
    cluster.run("scontrol", "release", held)
    state = cluster.wait(held, 180)
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "2"), cluster.output(held)
    assert not (tmp_path / "PWNED").exists() and (tmp_path / "victim").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "victim"]
    assert [len(logs(cluster, held, attempt)) for attempt in range(3)] == [4, 4, 4]


@pytest.mark.slow
def test_a_dead_rank_ends_the_attempt_and_three_without_progress_the_job(cluster, stand_in):
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in("[[ $RANK == 1 ]] && exit 7; sleep 300"))
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "2")
    assert "task 1: Exited with exit code 7" in cluster.output(job)
    assert "3 attempts saved no checkpoint" in cluster.output(job)
    assert [len(logs(cluster, job, attempt)) for attempt in range(4)] == [4, 4, 4, 0]


@pytest.mark.slow
def test_progress_starts_the_count_anew_and_success_ends_it(cluster, stand_in):
    behaviour = "case $SLURM_RESTART_COUNT in 2) saved; stopped;; 5) exit 0;; *) exit 1; esac"
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in(behaviour))
    state = cluster.wait(job, 180)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "5"), cluster.output(job)


@pytest.mark.slow
def test_a_preempted_job_is_told_and_comes_back(cluster, stand_in):
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in(f"if {FIRST_ATTEMPT}; then {OBEY}; fi"))
    cluster.until(lambda: len(logs(cluster, job)) == 4 and all(logs(cluster, job)), 120, "the ranks", job)
    urgent = cluster.submit("--partition=urgent", "--exclusive", "--wrap=sleep 2")
    assert cluster.wait(urgent, 120)["JobState"] == "COMPLETED"
    state = cluster.wait(job, 120)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(job)
    assert all("exiting program after receiving SIGTERM" in log for log in logs(cluster, job))


def test_a_cancelled_job_does_not_come_back(cluster, stand_in):
    job = cluster.submit(PRETRAIN, "my.yaml", MEGATRON_VP_PYTHON=stand_in(OBEY))
    cluster.until(lambda: len(logs(cluster, job)) == 4 and all(logs(cluster, job)), 120, "the ranks", job)
    cluster.run("scancel", job)
    cluster.until(lambda: not cluster.run("squeue", "--noheader", "--format=%i"), 60, "the end of the job", job)
    state = cluster.state(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")


TRAINS = (*QUICKSTART, *TINY, "--vocab-parallel", "--train-iters=100", "--num-workers=1")


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The losses of a run that nothing happens to."""
    job = cluster.submit(PRETRAIN, *TRAINS, "--tensorboard-dir=whole/tensorboard")
    assert cluster.wait(job, 500)["JobState"] == "COMPLETED", cluster.output(job)
    losses = _losses(cluster.work / "whole" / "tensorboard")
    assert sorted(losses) == list(range(1, 101))
    return losses


@pytest.mark.slow
def test_killed_and_stopped_runs_go_on_with_the_same_losses(cluster, undisturbed):
    """One rank is killed, then the time limit is announced: the losses are bit by bit those of an undisturbed run."""
    folders = ("--save=stopped", "--load=stopped", "--tensorboard-dir=stopped/tensorboard", "--save-interval=40")
    job = cluster.submit(PRETRAIN, *TRAINS, *folders)

    def reached(iteration: int, attempt: int) -> bool:
        return any(f"iteration {iteration:8d}/" in log for log in logs(cluster, job, attempt))

    cluster.until(lambda: reached(45, attempt=0), 600, "iteration 45", job)
    cluster.run("kill", "-KILL", _rank_process(cluster, job, rank=2))
    cluster.until(lambda: reached(50, attempt=1), 600, "iteration 50", job)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    state = cluster.wait(job, 600)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2"), cluster.output(job)
    texts = ["".join(logs(cluster, job, attempt)) for attempt in range(3)]
    loaded = [re.findall(r"successfully loaded checkpoint .* at iteration (\d+)", text) for text in texts]
    assert loaded[:2] == [[], ["40"]]
    (resumed,) = loaded[2]
    assert 50 <= int(resumed) < 80, "the signal's own checkpoint, not one of the interval"
    assert _losses(cluster.work / "stopped" / "tensorboard") == undisturbed


def _rank_process(cluster, job: str, rank: int) -> str:
    """The process number of a rank of the job's training step."""
    rows = [line.split() for line in cluster.run("scontrol", "listpids", job).splitlines()[1:]]
    (pid,) = [row[0] for row in rows if row[2] == "1" and row[4] == str(rank)]
    return pid


def _losses(folder: Path) -> dict[int, float]:
    """Training loss by iteration; of an iteration that was repeated the last."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("lm loss")}
