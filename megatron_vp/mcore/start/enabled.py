"""Implements `megatron_vp.enable`, for scripts and frameworks with their own training loops.

`enable` applies the same patches as command-line flags would. If the script lets Megatron parse arguments, the settings
passed to `enable` act like flags at the start of the command line. If Megatron does not parse arguments, the job is set
up when the first model is built: its description is made of the settings, the model's configuration and the sizes of
Megatron's process groups. Megatron has validated the configuration by then, so it gets no arguments to validate.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore import patch_table, patches, settled
from megatron_vp.mcore.settled import ROLES, OwnLoop, SettledJob, Words, run_settings
from megatron_vp.mcore.start.launch import patch_megatron


class Handle:
    """The handle that `megatron_vp.enable` returns."""

    def __init__(self, before: Sequence[patches.Patch]) -> None:
        self._before = {patch.target for patch in before}

    def plain_models(self) -> AbstractContextManager[Any]:
        """A context that leaves the models that are built inside to Megatron, for critics and reward models, which
        have heads of their own, and for reference models. Megatron's own schedule runs them, inside and afterwards.
        """
        return mock.patch.object(settled.process, "plain", True)

    def disable(self) -> None:
        """Undo the call of `megatron_vp.enable` and restore Megatron. Models built after that call can no longer be
        trained.
        """
        patches.undo(patch for patch in patches.in_force() if patch.target not in self._before)
        settled.begin()
        settled.process.own_loop = None


def enable(settings: Mapping[str, Any]) -> Handle:
    """Apply the patches for `settings` and return a handle, as `megatron_vp.enable` describes."""
    if settled.process.own_loop is not None:
        raise UserError(
            "megatron_vp.enable was called twice: call disable() on the first call's handle before the second call"
        )
    handle = Handle(patches.in_force())
    try:
        # The script's own command line is not read here, because it can contain arguments that Megatron does not know.
        patch_megatron([""])
        from megatron.training.arguments import add_megatron_arguments

        parser: Any = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args, words = parser.parse_call(settings)
        settled.process.own_loop = OwnLoop(
            words, partial(_described, args, settings), partial(_settle, settings, words)
        )
        if run_settings(args).replaces_schedule:
            _require_no_model()
        patch_table.require_fit(args)
        # Apply these patches before a model or its layer specification exists, so that no training loop silently uses
        # Megatron's own schedule or attention.
        patch_table.apply_early(args, "pipeline schedule", "models of custom scripts", "flash attention")
    except UserError:
        handle.disable()
        raise
    return handle


def _require_no_model() -> None:
    """Raise UserError if the script has already built a model, which would silently train as in plain Megatron."""
    module = sys.modules.get("megatron.core.models.common.language_module.language_module")
    if module is None:
        return
    # Compare types, because proxy objects can deceive `isinstance`.
    built = {type(each) for each in gc.get_objects() if issubclass(type(each), module.LanguageModule)}
    if built:
        raise UserError(
            f"megatron_vp.enable was called after this script had built a {min(kind.__name__ for kind in built)}: call "
            f"it before the script builds a model, ideally in its first lines"
        )


_OF_THE_SCRIPT = {"eval_interval": 1, "micro_batch_size": 1}
"""Arguments that our rules read, but that only the script's loop knows."""


def _settle(settings: Mapping[str, Any], words: tuple[str, ...], given: Arguments) -> SettledJob:
    from megatron_vp.mcore.options.settle import settled_job
    from megatron_vp.mcore.start.banner import print_banner
    from megatron_vp.mcore.start.same_job import require_same_job, settle_with_one_order

    settled.process.words = Words(words)
    job = settled_job(given)
    require_same_job(job)
    job = settle_with_one_order(job)
    patch_table.apply(job.arguments, early=False)
    if job.arguments.rank == 0:
        print_banner(job, knows_batch={"global_batch_size", "micro_batch_size"} <= settings.keys())
    return job


def _described(called: Arguments, settings: Mapping[str, Any], model: Mapping[str, Any]) -> Arguments:
    """The job of a model's configuration and of the sizes of Megatron's process groups, under the settings `called`."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise UserError(
            "this script builds a model before initialize_model_parallel, or with process groups of its own, but "
            "megatron_vp.enable needs the sizes of Megatron's groups: call initialize_model_parallel first, and in "
            "Megatron-Bridge keep dist.use_decentralized_pg=False"
        )
    config = model["config"]
    taken = vars(config).keys() & vars(called).keys() - set(ROLES["not_of_models"])
    # Functions in a configuration are not arguments, and a field that is None leaves an argument at its default.
    said = {name: each for name in taken if (each := getattr(config, name)) is not None and not callable(each)}
    if settled.process.job is not None and settled.process.job.settings.splits_backward:
        said.pop("delay_wgrad_compute", None)  # Set by us, in all configurations that follow the first model.
    sizes = {
        f"{group}_parallel_size": getattr(parallel_state, f"get_{group}_parallel_world_size")()
        for group in ROLES["process_groups"]
    }
    # By default, shards are balanced, which may move layers. Here, the user's script places the layers, so the default
    # is even shards.
    unsaid = _OF_THE_SCRIPT | ({"vocab_shards": "even"} if called.vocab_parallel else {})
    job = (
        called
        | said
        | sizes
        | {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "distributed_backend": dist.get_backend(),
            "vocab_size": model["vocab_size"],
            "padded_vocab_size": model["vocab_size"],
            "make_vocab_size_divisible_by": 1,
            "max_position_embeddings": model["max_sequence_length"],
            "seq_length": model["max_sequence_length"],
            "position_embedding_type": model["position_embedding_type"],
            "untie_embeddings_and_output_weights": not model["share_embeddings_and_output_weights"],
            "decoder_first_pipeline_num_layers": config.num_layers_in_first_pipeline_stage,
            "decoder_last_pipeline_num_layers": config.num_layers_in_last_pipeline_stage,
            "num_experts": config.num_moe_experts,
            "swiglu": config.gated_linear_unit,
            "group_query_attention": config.num_query_groups != config.num_attention_heads,
        }
        | {name: value for name, value in unsaid.items() if name not in settings}
    )
    if config.pipeline_model_parallel_layout is not None:
        raise UserError(
            "megatron_vp.enable does not support a pipeline_model_parallel_layout in the model's configuration: remove "
            "it, or let Megatron parse --pipeline-model-parallel-layout from the command line"
        )
    if job.vocab_parallel and job.vocab_shards.startswith(("balanced", "measured:")):
        raise UserError(
            f"vocab_shards={job.vocab_shards!r} may move layers, but this script places the layers itself: use "
            "'even', or one number of rows for each pipeline rank"
        )
    run, chunks = run_settings(job), job.virtual_pipeline_model_parallel_size or 1
    needed = run.family.chunks
    # Without a schedule, the chunks decide which one is used; some schedules accept any number of chunks.
    if job.pipeline_schedule is None or needed is None:
        job |= {"num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None}
    elif run.replaces_schedule and needed != chunks:
        raise UserError(
            f"--pipeline-schedule {job.pipeline_schedule} has {needed} chunks per rank, but this script's process "
            f"groups have {chunks}: set virtual_pipeline_model_parallel_size={needed if needed > 1 else None} in "
            f"initialize_model_parallel and in the model's configuration, and build one GPTModel for each vp_stage"
        )
    return job | {"global_batch_size": job.global_batch_size or job.micro_batch_size * job.data_parallel_size}
