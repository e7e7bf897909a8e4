"""How many vocabulary rows each pipeline rank of this job holds: `--vocab-shards`, resolved before Megatron starts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_vp.cost.balance.balanced import Shards, balanced, most_rows
from megatron_vp.cost.balance.chosen_shards import with_partition
from megatron_vp.cost.balance.measured_rows import next_rows
from megatron_vp.cost.sizes.job_plan import layout_option
from megatron_vp.errors import UserError
from megatron_vp.jobs.layout_text import layout_of
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.jobs.vocab_shards import ShardChoice, ShardRule
from megatron_vp.mcore.choices import chosen_family
from megatron_vp.mcore.options.predicted_job import predicted_job, vocabulary
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.storage.checkpoint_check import partition_to_keep
from megatron_vp.row_counts import check_stage_rows
from megatron_vp.schedule import VocabMethod
from megatron_vp.trace.partition import Partition


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
    vocab_size = vocabulary(args)
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
    kept = partition_to_keep(args)
    if kept is not None:
        args.vocab_rows, layout = kept
        args._shards_said = "as in the checkpoint, whose optimizer state fits no others" if args.vocab_rows else None
        _lay_out(args, layout)
        return
    try:
        job, plan, hardware = predicted_job(args)
        if not _is_laid_out(args):
            plan = replace(plan, layers=None)
        found = balanced(job, plan, hardware, memory_limit=hardware.memory if hardware.is_gpu else None)
    except UserError as error:
        args._shards_said = f"equal, because --vocab-shards balanced cannot predict this job: {error}"
        return
    _take(args, found, f"predicted {found.gain:.3f} times as fast as equal ones on {hardware.name}")


def _follow(args: argparse.Namespace, folder: Path) -> None:
    """Take the rows, and the layers, that a run's pass times give. Raises UserError for a run of another partition."""

    def room(partition: Partition) -> tuple[int, ...] | None:
        try:
            job, plan, hardware = predicted_job(args)
            if not hardware.is_gpu:
                return None
            return most_rows(job, with_partition(plan, partition), hardware, hardware.memory)
        except UserError:  # a job that the cost model does not count
            return None

    ranks, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    layers, option = layers_given(args) if _is_laid_out(args) else None, layout_option(vars(args))
    chosen = next_rows(folder, ranks, tensor, vocabulary(args), layers, option, room)
    _take(args, chosen, f"--vocab-shards measured:{folder}: the busiest rank had {chosen.gain:.3f} times this work")


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
