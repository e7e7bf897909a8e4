"""Rehearses the start of a job in one process: `megatron-vp check` runs what a rank runs until its first iteration.

The script's own `main` runs with PyTorch's fake process group, and with fake tensors instead of the model's weights. It
builds the tokenizer, the loggers, the model, the optimizer and the datasets with Megatron's own constructors, so a job
that dies in one of them is refused with the same words here. Three things differ from a start. Outputs go to a
temporary folder. Datasets are opened, but their sample indices, which can take minutes and are written to a cache, are
not built. No checkpoint is loaded: `storage.checkpoint_check` checks it instead.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch

from megatron_vp.errors import UserError
from megatron_vp.jobs.shipped import TRAINING_SCRIPT
from megatron_vp.mcore import patch_table, patches
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.flags import switch_off_what_needs_a_gpu, uses_cpu
from megatron_vp.mcore.platform.installed import Installed
from megatron_vp.mcore.replay import shapes_only
from megatron_vp.mcore.settled import ROLES, SettledJob, current, process
from megatron_vp.mcore.start.launch import as_one_line, is_raised_on_purpose, line_of
from megatron_vp.mcore.storage.checkpoint_files import check_writable

_CACHE = "--data-cache-path"


class _Started(Exception):
    """Raised where the first iteration would begin."""


def rehearse(job: SettledJob, own_script: bool = False) -> list[str]:
    """Start rank 0 and the last rank of a job without their peers, until their first iteration would begin. Returns a
    line if this machine cannot rehearse a part of the start.

    The job must be settled, with its patches in force. Of a job with its own script, only the tokenizer and the loggers
    are built, because Megatron builds them when it parses the arguments. Raises UserError with the first error of the
    start.
    """
    from megatron.training import arguments

    patch_table.apply(job.arguments, early=False)
    patches.apply(patch_table.patches_of("shapes only"))
    if uses_cpu([]):
        switch_off_what_needs_a_gpu(job.args)
    else:
        patches.apply(patch_table.patches_of("cpu platform"))
    script, rehearsal = None if own_script else _script(), _Rehearsal(job.nodes)
    offline = mock.patch.dict(os.environ, WANDB_MODE="disabled")
    with shapes_only.silent(errors=True), offline, tempfile.TemporaryDirectory() as folder, shapes_only.fake_tensors():
        for rank in dict.fromkeys((0, job.args.world_size - 1)):
            args = _arguments_of(job.args, rank, Path(folder))
            process.job = job.of(args)
            with as_one_line(), _alone(args, rehearsal):
                arguments.set_global_variables(args)
                if script is not None:
                    with mock.patch.object(script, "parse_and_validate_args", lambda args=args: args):
                        rehearsal.start(script.main)
    return rehearsal.said


class _Rehearsal:
    """Runs the parts of a start in which this machine may not stand for a node. `said` lists what it did not run.

    Transformer Engine's layers need a GPU to be built. An error in a job for GPUs, or one that no line raises on
    purpose, may be due to the rehearsal itself, so it is reported but does not refuse the job.
    """

    def __init__(self, nodes: Installed | None) -> None:
        self.said: list[str] = []
        self._differs = nodes is not None and nodes.engine != installed.here().engine

    def start(self, main: Callable[[], None]) -> None:
        """Run a script until its first iteration would begin."""
        try:
            main()
        except _Started:
            pass
        except Exception as error:
            if _is_of_the_job(error) or (uses_cpu([]) and current().nodes is None):
                raise
            self.said.append(f"the rest of the start could not be rehearsed on this machine: {line_of(error)}")

    def build(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Build the model and the optimizer with Megatron's function."""
        reason = ", because Transformer Engine is not the same here"
        if not self._differs:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if isinstance(error, UserError) or (uses_cpu([]) and _is_of_the_job(error)):
                    raise
                reason = f": {line_of(error)}"
        self.said[:] = [f"whether the model and its optimizer can be built was not checked{reason}"]
        current().args.iteration = 0
        return [SimpleNamespace(config=SimpleNamespace())], None, None


def _script() -> ModuleType:
    """Import the training script, which is not part of the package."""
    spec = importlib.util.spec_from_file_location(TRAINING_SCRIPT.stem, TRAINING_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments_of(args: argparse.Namespace, rank: int, folder: Path) -> argparse.Namespace:
    args = copy.deepcopy(args)
    args.rank, args.local_rank, args.do_train, args.fake_process_group = rank, 0, True, True
    vars(args).update(dict.fromkeys(ROLES["unset_in_rehearsals"]) | dict.fromkeys(ROLES["off_in_rehearsals"], 0))
    for name in ROLES["written"]:
        if getattr(args, name, None):
            setattr(args, name, str(folder / name))
    return args


def _is_of_the_job(error: Exception) -> bool:
    """Whether an error shows a mistake in the job, and not that this machine lacks a package that its nodes have."""
    return is_raised_on_purpose(error) and not (current().nodes is not None and isinstance(error, ImportError))


@contextlib.contextmanager
def _alone(args: argparse.Namespace, rehearsal: _Rehearsal) -> Iterator[None]:
    """Inside this context, this process is a rank of the job without peers. Megatron's state is removed afterwards."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.training import ft_integration, training

    samples, blend = GPTDataset._build_document_sample_shuffle_indices, BlendedDataset._build_indices
    with (
        mock.patch.dict(os.environ, RANK=str(args.rank), LOCAL_RANK="0"),
        mock.patch.multiple(training, train=_stop, evaluate_and_print_results=_stop),
        mock.patch.object(
            training, "setup_model_and_optimizer", partial(rehearsal.build, training.setup_model_and_optimizer)
        ),
        mock.patch.object(ft_integration, "setup", lambda: None),
        mock.patch.object(GPTDataset, samples.__name__, partialmethod(_unbuilt_samples, samples)),
        mock.patch.object(BlendedDataset, blend.__name__, partialmethod(_unbuilt_blend, blend)),
    ):
        try:
            yield
        finally:
            if torch.distributed.is_initialized():
                training.destroy_global_state()
                torch.distributed.destroy_process_group()
            else:
                sys.modules["megatron.training.global_vars"].unset_global_variables()


def _stop(*_: Any, **__: Any) -> None:
    raise _Started


def _unbuilt_samples(self: Any, original: Callable[..., Any]) -> Any:
    """Instead of the indices of samples, return arrays of the right length. Indices that must exist are loaded."""
    if self.config.defer_npy_index_mmap or self.config.fast_cache_load:
        return original(self)
    tokens = self._get_num_tokens_per_epoch()
    whole = (tokens - self.config.add_extra_token_to_sequence) // self.config.sequence_length
    samples = self.num_samples or whole + (not self.config.drop_last_partial_validation_sequence)
    if not self.config.mock:
        kind = f"{type(self).__name__}_indices"
        check_writable(_CACHE, self.config.path_to_cache or os.path.join(self.dataset.path_prefix, "cache", kind))
    return tuple(numpy.broadcast_to(numpy.zeros(1, numpy.int64), max(samples, 0) + 1) for _ in range(3))


def _unbuilt_blend(self: Any, original: Callable[..., Any]) -> Any:
    if self.config.defer_npy_index_mmap or self.config.fast_cache_load:
        return original(self)
    if self.config.path_to_cache:
        check_writable(_CACHE, self.config.path_to_cache)
    size = sum(self.weights) if self.size is None else self.size
    return (numpy.broadcast_to(numpy.zeros(1, numpy.int64), size),) * 2
