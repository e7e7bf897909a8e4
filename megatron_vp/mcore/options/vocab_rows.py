"""How many vocabulary rows each pipeline rank of this job holds: `--vocab-shards`, resolved before Megatron starts."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_vp.cost.balance import Shards, balanced, most_rows
from megatron_vp.cost.hardware import HARDWARE, Hardware
from megatron_vp.cost.job_plan import plan_of, uncounted
from megatron_vp.cost.job_sizes import job_of
from megatron_vp.cost.measured_rows import read_run, refilled
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import SIZES, JobConfig, read_job_config
from megatron_vp.jobs.layout_text import layout_of
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.jobs.vocab_shards import ShardChoice, ShardRule
from megatron_vp.mcore import choices
from megatron_vp.mcore.choices import chosen_family
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.reports import memory
from megatron_vp.mcore.reports.cut import layers_given
from megatron_vp.mcore.storage.checkpoint_check import cut_to_keep
from megatron_vp.mcore.storage.dataset import padded_vocabulary
from megatron_vp.schedule import VocabMethod
from megatron_vp.shards import check_stage_rows
from megatron_vp.trace.cut import Cut

UNKNOWN_GPU = "h100"
"""What the cost model takes a GPU for that it has no figures of: relative times of passes differ little."""


def resolve_rows(args: argparse.Namespace) -> None:
    """Set `args.vocab_rows`: rows by pipeline rank, the tensor ranks of a stage together; None for equal shards.

    Chosen rows may bring their layers along, where the arguments name no layout: then `args` get one. Every rank comes
    to the same choice, from its arguments and the name of its GPU. Call it before Megatron validates the arguments.
    Raises UserError.
    """
    args.vocab_rows, args._shards_said = None, None
    choice = ShardChoice.parse(args.vocab_shards)
    if not args.vocab_parallel or args.pipeline_model_parallel_size < 2 or choice.rule is ShardRule.EVEN:
        return
    if choice.rule is ShardRule.ROWS:
        args.vocab_rows = choice.rows
    elif choice.folder is not None:
        _follow(args, choice.folder)
    elif not needs_even_shards(args) and chosen_family(args).fixed is None:
        _balance(args)


def check_rows(args: argparse.Namespace) -> None:
    """Raise UserError for rows that do not fit validated Megatron arguments."""
    if args.vocab_rows is None:
        return
    vocab_size = _vocabulary(args)
    if vocab_size is not None:  # else the model's own size is compared when its layers are cut
        sizes = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
        check_stage_rows(args.vocab_rows, vocab_size, *sizes)


def needs_even_shards(args: argparse.Namespace) -> bool:
    """Whether all ranks do the vocabulary work of a microbatch in one pass together."""
    return chosen_family(args).own_method is VocabMethod.INTERLACED


def describe_rows(args: argparse.Namespace) -> str | None:
    """The rows, and why these, in one line; None for equal shards that need no reason."""
    said = args._shards_said
    if args.vocab_rows is None:
        return said and f"vocabulary rows by pipeline rank: {said}"
    rows = ",".join(map(str, args.vocab_rows))
    return f"vocabulary rows by pipeline rank: {rows} ({said or f'--vocab-shards {args.vocab_shards}'})"


def _balance(args: argparse.Namespace) -> None:
    """Take the rows, and where no layout is given the layers, that are predicted to be fastest.

    A job of which the cost model does not know all sizes keeps equal shards.
    """
    kept = cut_to_keep(args)
    if kept is not None:
        args.vocab_rows, layout = kept
        args._shards_said = "as in the checkpoint, whose optimizer state fits no others" if args.vocab_rows else None
        _lay_out(args, layout)
        return
    try:
        config = _job_config(args)
        unknown = uncounted(config)
        if unknown:
            raise UserError(f"the cost model does not count {', '.join(unknown)}")
        plan, job, hardware = plan_of(config), job_of(config.values, args.world_size), _hardware()
        if not _is_laid_out(args):
            plan = replace(plan, layers=None)
        found = balanced(job, plan, hardware, memory_limit=hardware.memory if hardware.is_gpu else None)
    except UserError as error:
        args._shards_said = f"equal, because --vocab-shards balanced cannot predict this job: {error}"
        return
    _take(args, found, f"predicted {found.gain:.3f} times as fast as equal ones on {hardware.name}")


def _follow(args: argparse.Namespace, folder: Path) -> None:
    """Take the rows, and the layers, that a run's pass times give. Raises UserError for a run of another cut."""
    run = read_run(folder)
    rows, vocab_size = run.cut.vocab_rows or (), _vocabulary(args)
    found = len(rows), run.cut.tensor, sum(rows)
    asked = args.pipeline_model_parallel_size, args.tensor_model_parallel_size, vocab_size or sum(rows)
    for what, there, here in zip(("pipeline ranks", "tensor ranks", "vocabulary rows"), found, asked, strict=True):
        if there != here:
            raise UserError(
                f"--vocab-shards measured:{folder} is of a run with {there} {what}, and this job has {here}: measure a "
                "run of this job"
            )
    if _is_laid_out(args) and run.cut.layers is not None and layers_given(args) != run.cut.layers:
        option = "--pipeline-model-parallel-layout" if pattern_in(vars(args)) is None else "--hybrid-layer-pattern"
        raise UserError(
            f"--vocab-shards measured:{folder} is of a run with the layers {list(run.cut.layers)}, and {option} has "
            "others: measure a run of this layout, or leave the layout (of a pattern, its bars) out"
        )
    chosen = refilled(run.cut, run.seconds, _room(args, run.cut))
    _take(args, chosen, f"--vocab-shards measured:{folder}: the busiest rank had {chosen.gain:.3f} times this work")


def _room(args: argparse.Namespace, cut: Cut) -> tuple[int, ...] | None:
    """Rows that each pipeline rank has memory for; None where the cost model cannot tell."""
    hardware = _hardware()
    try:
        config = _job_config(args)
        if uncounted(config) or not hardware.is_gpu:
            return None
        plan = replace(plan_of(config), layers=cut.layers)
        return most_rows(job_of(config.values, args.world_size), plan, hardware, hardware.memory)
    except UserError:
        return None


def _take(args: argparse.Namespace, shards: Shards, why: str) -> None:
    """Run with these rows, and with these layers where the arguments name none."""
    args.vocab_rows = shards.rows
    laid_out = shards.layers is not None and not _is_laid_out(args)
    if laid_out:
        pattern = pattern_in(vars(args))
        _lay_out(args, layout_of(shards.layers) if pattern is None else pattern.with_bars(shards.layers))
    layers = f"layers by stage: {','.join(map(str, shards.layers))}" if laid_out else None
    if shards.rows is None:
        args._shards_said = layers and f"equal; {layers}"
    else:
        args._shards_said = "; ".join(filter(None, (why, layers)))


def _lay_out(args: argparse.Namespace, layout: str | None) -> None:
    """Give a job without a layout this one, of a hybrid model its pattern with bars. It also says how many chunks a
    rank has.
    """
    if layout is None or _is_laid_out(args):
        return
    if pattern_in(vars(args)) is None:
        args.pipeline_model_parallel_layout = layout
        args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    else:
        args.hybrid_layer_pattern, args.hybrid_override_pattern = layout, None


def _is_laid_out(args: argparse.Namespace) -> bool:
    return args.pipeline_model_parallel_layout is not None or layers_given(args) is not None


def _job_config(args: argparse.Namespace) -> JobConfig:
    """The job in the words of all commands, with the sizes that a checkpoint may have replaced. Raises UserError.

    Of a replay it is the whole job, so that every rank that is replayed has the rows that it has in the job.
    """
    vocab_size = _vocabulary(args)
    if vocab_size is None:
        raise UserError("the vocabulary's size is not known before its tokenizer can be read")
    sizes: dict[str, Any] = {"padded_vocab_size": vocab_size}
    given = choices.replayed
    if given is None:
        given = read_job_config([], args._words)
        sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None} | sizes
    return JobConfig(given.values | sizes, given.origins | dict.fromkeys(sizes, "the job's"))


def _vocabulary(args: argparse.Namespace) -> int | None:
    """The padded vocabulary; a tokenizer is read once, because a large one takes seconds."""
    if "_vocabulary" not in vars(args):
        args._vocabulary = padded_vocabulary(args)
    return args._vocabulary


def _hardware() -> Hardware:
    """What the cost model knows of this rank's device: by the GPU's name, or as of a usual GPU or CPU core."""
    if installed.of_nodes is not None or memory.of_shapes is not None:  # of a job that runs on GPUs elsewhere
        return HARDWARE[UNKNOWN_GPU]
    if uses_cpu([]):
        return HARDWARE["cpu"]
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name().lower())
    return next((entry for name, entry in HARDWARE.items() if name in words), HARDWARE[UNKNOWN_GPU])
