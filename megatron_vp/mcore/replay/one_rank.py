"""Runs one rank of a large job alone, with PyTorch's fake process group in place of its peers.

The rank builds the same layers as in the job and runs the same program: every pass, in the order of the schedule, with
the job's shapes. Communication returns immediately, and data from peers is random. The passes take the same time and
memory as in the job, but losses and gradients are meaningless. The time that a rank of the job waits for its peers is
not measured; the simulator adds it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig, last_batch, parallel_sizes, read_job_config, whole_number
from megatron_vp.jobs.layer_kind import LayerKind, layer_kind
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.replay.shapes_only import fake_tensors, silent
from megatron_vp.mcore.settled import ROLES, SettledJob, process
from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES, PassCosts

ROUNDS = 3
"""With p pipeline ranks, activation memory reaches its peak within ROUNDS * p microbatches, under every schedule."""


@dataclass(frozen=True)
class Replayed:
    """The measurements of one rank. Times are medians over all iterations except the first."""

    pipeline_rank: int
    pipeline_size: int
    microbatches: int
    """The number of microbatches per iteration of the job. Pass times are per microbatch."""
    pass_milliseconds: dict[str, float]
    """The time of each kind of pass for one microbatch, summed over the rank's chunks; empty with --shapes-only."""
    iteration_milliseconds: float | None
    """The time of the passes and of the gaps between them, without waits for peers; None with --shapes-only."""
    memory_bytes: dict[str, int]
    """Bytes by name. `parameters` and `gradients` are always given. `allocated` (before an iteration) and `peak`
    (during an iteration) are given on a GPU or with --shapes-only. `reserved` (by PyTorch's allocator) and `outside`
    (in use outside of the allocator) are given only on a GPU.
    """
    played: int | None = None
    """With --shapes-only, the number of microbatches that ran, which is enough to reach the memory peak."""
    layers: LayerKind | None = None
    """With --shapes-only, the kind of layers whose memory was counted (Megatron's local or Transformer Engine's)."""

    def costs(self) -> str:
        """Format the pass times as `megatron-vp schedule --cost` expects them. Passes that did not run get the time 0.

        If the schedule has no W passes, B includes the weight gradients.
        """
        kinds = (name for name in PassCosts().named() if name != "comm")
        return ",".join(f"{kind}={self.pass_milliseconds.get(kind, 0):.4g}" for kind in kinds)


def run_alone(
    script: str,
    configs: Sequence[str | os.PathLike[str]],
    rank: int,
    ranks: int | None,
    iterations: int,
    flags: list[str],
    shapes_only: bool = False,
) -> Replayed:
    """Run rank `rank` of the job that `configs` and `flags` describe, in this process and without the other ranks.

    Args:
        configs: YAML files; later ones override earlier ones.
        rank: the global rank in the job. All tensor ranks do the same work, so the first of them runs.
        ranks: the number of ranks in the job; None for one model replica.
        iterations: the number of training iterations to time, after one that is not timed.
        flags: any Megatron flags.
        shapes_only: count memory without computing, which needs no GPU. Tensors that are cached during the replay stay
            fake, so this process cannot use them in real computations afterwards.

    Raises:
        UserError: if `rank` is not in the job, the vocabulary size is unknown, `shapes_only` is set for a model with
            experts, or the job itself would be refused.
    """
    from megatron_vp.mcore.start.launch import run_script

    job = read_job_config(configs, flags)
    sizes = parallel_sizes(job)
    replica = math.prod(sizes)
    ranks = replica if ranks is None else ranks
    if min(sizes) < 1 or ranks % replica or not 0 <= rank < ranks:
        raise UserError(
            f"--rank {rank} with --ranks {ranks} does not fit this job: --ranks must be a multiple of pipeline x "
            f"tensor x context = {' x '.join(map(str, sizes))}, and --rank must be from 0 to --ranks - 1"
        )
    rank -= rank % sizes[1]  # Only the first tensor rank reads a batch; the others would wait for it.
    if shapes_only and (experts := whole_number(job, "num_experts", 0)):
        raise UserError(
            f"--shapes-only does not support --num-experts {experts}, because the sizes of expert inputs depend on "
            "routing: replay on a GPU, without --shapes-only"
        )
    tokens = whole_number(job, "vocab_size", 0) or whole_number(job, "padded_vocab_size", 0)
    if not tokens:
        raise UserError(
            "the vocabulary size is unknown, because a replay does not read a tokenizer: add --vocab-size N"
        )
    kind = layer_kind(job)
    engine = shapes_only and kind is LayerKind.ENGINE
    growing = job.get("step_batch_size_schedule")
    each = whole_number(job, "micro_batch_size", 1) * (ranks // replica)
    played, microbatches = _microbatches(job, each, growing)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # Nothing connects to this address.
    left_out = {*ROLES["data"], *ROLES["not_replayed"], "step_batch_size_schedule", "cpu"}
    left_out |= set(ROLES["not_replayed_on_shapes"] if engine else ())
    alone = {name: value for name, value in job.items() if name not in left_out}
    alone |= dict.fromkeys(("train_iters", "eval_interval", "log_interval"), iterations + 1)
    alone |= dict.fromkeys(("lr_warmup_iters", "eval_iters"), 0) | {"fake_process_group": True}
    alone |= {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": tokens}
    if growing is not None or (shapes_only and played < microbatches):
        alone["global_batch_size"] = each * (played if shapes_only else microbatches)
    if shapes_only:
        # Worker processes of a data loader cannot send fake tensors. Reruns are disabled, because Megatron keeps the
        # data for reruns in host memory, which a replay would count as device memory.
        alone |= {"num_workers": 0, "rerun_mode": "disabled"}
    if engine:  # Local layers replace Transformer Engine's layers, which need a GPU.
        alone |= {"transformer_impl": "local", "core_attention": "sdpa"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as inside:
        kept, report = Path(folder) / "job.yaml", Path(folder) / "report"
        kept.write_text(yaml.safe_dump(alone | {"rank_report": str(report)}))
        inside.enter_context(mock.patch.object(process, "replayed", job))
        if shapes_only:
            inside.enter_context(silent())
            inside.enter_context(fake_tensors(engine))
        run_script(script, ["--config", str(kept), *(["--cpu"] if shapes_only or job.get("cpu") else [])])
        if not report.exists():
            raise UserError(
                "the replayed rank wrote no report: run `megatron-vp patches` to check that every patch fits Megatron"
            )
        found = _read(next(report.iterdir()), timed=not shapes_only)
    if not shapes_only:
        return found
    return replace(found, microbatches=max(microbatches, found.microbatches), played=found.microbatches, layers=kind)


def run_iteration(job: SettledJob, words: Sequence[str]) -> list[str]:
    """Run an iteration of rank 0 and of the last rank of a job, whose words are `words`, on fake tensors. Returns a
    line if it could not be run. Raises UserError if the job is the reason.
    """
    if job.arguments.num_experts or job.arguments.fine_grained_activation_offloading:
        return ["no iteration was run, because fake tensors are neither routed to experts nor offloaded"]
    ranks, vocabulary = job.arguments.world_size, Prediction(job.given, job.words).vocabulary
    for rank in dict.fromkeys((0, ranks - 1)):
        own = [f"--rank={rank}", f"--ranks={ranks}", "--iterations=1", "--shapes-only"]
        command = [sys.executable, "-m", "megatron_vp", "replay", *own, *words, f"--vocab-size={vocabulary}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stderr.strip().rpartition("\n")[2]
        if done.returncode == 2:
            raise UserError(last.partition("error: ")[2])
        if done.returncode:
            return [f"an iteration could not be run on fake tensors: {last}"]
    return []


def _microbatches(job: JobConfig, each: int, growing: str | None) -> tuple[int, int]:
    """Return how many microbatches of `each` samples suffice to reach the memory peak, and how many the job has, at
    the end of `growing` if the batch grows. The two numbers are equal if all microbatches must run, as with a schedule
    from a file.
    """
    batch = whole_number(job, "global_batch_size", 0) if growing is None else last_batch(growing)
    schedule = job.get("pipeline_schedule") or DEFAULT_SCHEDULE
    count = batch // max(each, 1)
    if schedule not in FAMILIES or batch % max(each, 1):
        return count, count
    return min(count, ROUNDS * whole_number(job, "pipeline_model_parallel_size", 1)), count


def _made_up_receives(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def communicate(self: Any, **arguments: Any) -> Any:
        *received, requests = original(self, **arguments)
        for tensor in received:
            if tensor is not None:
                tensor.data.normal_()
        return *received, requests

    return communicate


def _shifted_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def roll_tensor(*args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return roll_tensor


def _read(path: Path, timed: bool) -> Replayed:
    report = json.loads(path.read_text())
    count, passes = report["microbatches"], report["pass_milliseconds_by_iteration"][1:] if timed else [{}]
    return Replayed(
        pipeline_rank=report["pipeline_rank"],
        pipeline_size=report["pipeline_size"],
        microbatches=count,
        pass_milliseconds={kind: statistics.median(each[kind] for each in passes) / count for kind in passes[0]},
        iteration_milliseconds=statistics.median(report["iteration_milliseconds"][1:]) if timed else None,
        memory_bytes=report["memory_bytes"],
    )
