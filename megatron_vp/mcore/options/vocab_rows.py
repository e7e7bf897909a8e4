"""Turns `--vocab-shards` into the number of vocabulary rows of each pipeline rank, before Megatron starts."""

from __future__ import annotations

from pathlib import Path

from megatron_vp.cost.planning.balanced import balanced, best_shards
from megatron_vp.cost.planning.measured_rows import measured_rows
from megatron_vp.cost.planning.own_plan import may_stay_whole
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.layout_text import layout_of
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.jobs.vocab_shards import EVEN, STAYS_WHOLE, shards_of
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import ChosenRows, RunSettings, process
from megatron_vp.schedule import VocabMethod


def choose_rows(args: Arguments, settings: RunSettings, prediction: Prediction) -> ChosenRows:
    """Choose the number of vocabulary rows of each pipeline rank (summed over its tensor ranks), and possibly the
    layout of the pipeline's layers.

    A layout is chosen only if the arguments contain none. The choice depends only on the arguments, the files that they
    name, and the name of the GPU, so all ranks make the same choice. Call this function before Megatron validates the
    arguments. Raises UserError.
    """
    choice = shards_of(args.vocab_shards)
    if not args.vocab_parallel or args.pipeline_model_parallel_size < 2 or choice == EVEN:
        return ChosenRows()
    if isinstance(choice, tuple):
        return ChosenRows(choice)
    if needs_even_shards(settings) or settings.family.fixed is not None:
        return ChosenRows()
    if isinstance(choice, Path):
        own = {"pipeline_schedule": settings.family.name, "padded_vocab_size": prediction.vocabulary}
        layers, rows, gain = measured_rows(choice, {**vars(args), **own}, layers_given(args))
        why = f"from the pass times in {choice}: the busiest rank should be {gain:.3f} times as fast as in that run"
        return ChosenRows(rows, why, _layout(args, layers))
    return _balanced(args, prediction)


def needs_even_shards(settings: RunSettings) -> bool:
    """Whether shards must be equal, because all ranks do the vocabulary work of a microbatch in one joint pass."""
    return settings.family.own_method is VocabMethod.INTERLACED


def _balanced(args: Arguments, prediction: Prediction) -> ChosenRows:
    """Choose the rows (and, if no layout is given, the layers) that the cost model predicts to be fastest, or whole
    vocabulary layers. If the cost model cannot predict the job, the shards stay equal.
    """
    try:
        job, plan, hardware = prediction.job()
        named = {"vocab_parallel_algorithm": "--vocab-parallel-algorithm" in process.words.options}
        choose = best_shards if may_stay_whole({**vars(args), **named}, plan) else balanced
        found, gain = choose(job, plan, hardware, hardware.memory, _is_laid_out(args))
    except UserError as error:
        return ChosenRows(reason=f"the cost model behind --vocab-shards balanced cannot predict this job: {error}")
    if not found.vocab.is_sharded:
        return ChosenRows(reason=STAYS_WHOLE, whole=True)
    why = f"on {hardware.name}, training is predicted to be {gain:.3f} times as fast as with equal rows"
    return ChosenRows(found.vocab_rows, None if found.vocab_rows is None else why, _layout(args, found.layers))


def _is_laid_out(args: Arguments) -> bool:
    return args.pipeline_model_parallel_layout is not None or layers_given(args) is not None


def _layout(args: Arguments, layers: tuple[int, ...] | None) -> str | None:
    """A layout with these layers per stage; None if there are none, or the arguments say which layers a stage has."""
    if layers is None or _is_laid_out(args):
        return None
    pattern = pattern_in(vars(args))
    return layout_of(layers, args.mtp_num_layers or 0) if pattern is None else pattern.with_bars(layers)
