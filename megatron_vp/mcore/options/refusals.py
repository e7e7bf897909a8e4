"""Refuses runs that cannot work or that no test covers, and warns about options without their intended effect.

`jobs/options.py` lists the options of Megatron. The refusals here concern our own options, and sizes that Megatron
would refuse in words that do not help.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.core.utils import get_te_version, is_te_min_version

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.job_config import ALGORITHM_ALONE, ONE_QUEUE, TWO_BATCHES
from megatron_vp.jobs.known_options import Arguments, out_of_range
from megatron_vp.jobs.layout_text import layers_in, stages_behind_mtp
from megatron_vp.jobs.options import OPTIONS, OTHER_NAMES, RUNS, UNREAD
from megatron_vp.jobs.virtual_stages import SHIFTED_V, shifts_given
from megatron_vp.jobs.vocab_shards import BALANCED, EVEN_ALONE, NEEDS_VOCAB_PARALLEL, shards_of
from megatron_vp.mcore.model.delayed_weights import MINIMUM_VERSION
from megatron_vp.mcore.options.vocab_rows import needs_even_shards
from megatron_vp.mcore.platform.installed import lacks
from megatron_vp.mcore.reports.job_partition import iterations_in
from megatron_vp.mcore.settled import ROLES, process, run_settings
from megatron_vp.mcore.storage.optimizer_state import one_way
from megatron_vp.schedule import DEFAULT_SCHEDULE, PassKind, Placement, Schedule, VocabMethod


def _mtp_rank_holds_rows(a: Arguments) -> bool:
    """Whether the rank of the MTP layers holds vocabulary rows. The ranks of the first and the last stage, which join
    the vocabulary collectives in any case, need none.
    """
    placement = run_settings(a).placement(a.pipeline_model_parallel_size, _chunks(a))
    rank = placement.rank_of(placement.stages - 1 - stages_behind_mtp(a.pipeline_model_parallel_layout or ""))
    return a.vocab_rows is None or a.vocab_rows[rank] > 0 or rank in placement.vocab_members(())


def _delays_weights(a: Arguments) -> bool:
    """Whether pass W computes the weight gradients of Transformer Engine's layers."""
    return run_settings(a).splits_backward and a.transformer_impl == "transformer_engine"


def _chunks(a: Arguments) -> int:
    return a.virtual_pipeline_model_parallel_size or 1


def _misplaced(a: Arguments, file: Schedule) -> bool:
    """Whether a file's stages are where Megatron's code cannot run them."""
    last_anywhere = a.vocab_parallel and not a.mtp_num_layers
    last_chunk = file.placement.chunk_of(file.placement.stages - 1) + 1 == file.chunks
    linear = file.chunks > 1 or file.placement == Placement.round_robin(file.pipeline_size)
    return bool(file.placement.stage_of[0][0]) or not (last_anywhere or last_chunk) or not linear


def _starts_late(schedule: Schedule) -> bool:
    """Whether, in some chunk, the first weight gradient to be computed belongs to a microbatch other than 0."""
    gives = {PassKind.W if schedule.split_backward else PassKind.B, PassKind.BW}
    firsts = (
        {step.chunk: step.microbatch for step in reversed(order) if step.kind in gives} for order in schedule.ranks
    )
    return any(any(first.values()) for first in firsts)


def _faults(a: Arguments, words: Mapping[str, Any]) -> dict[str, Any]:
    """Which of REFUSALS apply to validated arguments, whose `_words` are given."""
    settings, chunks, smoothing = run_settings(a), _chunks(a), a.vocab_label_smoothing
    ours, file, own_chunks = settings.replaces_schedule, settings.family.fixed, settings.family.chunks
    of_file = file and {
        "file_method": a.vocab_parallel and file.vocab not in (VocabMethod.INTERLACED, a.vocab_parallel_algorithm),
        "file_offload": a.offload_chunks != "0",
        "file_ranks": file.pipeline_size != a.pipeline_model_parallel_size,
        "file_holders": file.vocab.is_sharded and file.vocab_ranks != words["row_holders"],
        "file_without_backward": not a.skip_train and not file.kinds & {PassKind.B, PassKind.BW},
        "file_microbatches": a.step_batch_size_schedule or file.microbatches != words["microbatches"],
        "file_placement": _misplaced(a, file),
        "file_starts_late": _starts_late(file),
    }
    return (of_file or {}) | {
        "offloaded_chunks": settings.offload_chunks(chunks) > chunks,
        "one_stage": ours and a.pipeline_model_parallel_size < 2,
        "old_engine": _delays_weights(a) and not is_te_min_version(MINIMUM_VERSION),
        "algorithm_alone": not a.vocab_parallel and _typed("vocab_parallel_algorithm"),
        "shards_alone": not a.vocab_parallel and shards_of(a.vocab_shards) != BALANCED,
        "even_alone": a.vocab_rows is not None and needs_even_shards(settings),
        "chunks": ours and (chunks < 2 if own_chunks is None else chunks != own_chunks),
        "shifted_v": settings.places_chunks and shifts_given(vars(a)),
        "heads_without_rows": a.vocab_parallel and a.mtp_num_layers and not _mtp_rank_holds_rows(a),
        "loss_terms": not (0 <= smoothing < 1 and 0 <= a.vocab_z_loss < math.inf),
        "uneven_heads": a.group_query_attention and a.num_attention_heads % (a.num_query_groups or 1),
        "late_trace": a.pipeline_trace
        and a.train_iters
        and iterations_in(a.pipeline_trace_iterations)[0] > a.train_iters,
    }


REFUSALS = {
    "algorithm_alone": ALGORITHM_ALONE,
    "shards_alone": NEEDS_VOCAB_PARALLEL,
    "even_alone": EVEN_ALONE,
    "shifted_v": SHIFTED_V,
    **tomllib.loads(Path(__file__).with_suffix(".toml").read_text().replace("MINIMUM_ENGINE", MINIMUM_VERSION)),
}
"""Combinations of arguments that cannot work: what cannot work, why, and what to do instead. Conditions on single
arguments are records in `jobs/options.toml`.
"""


def _asked(a: Arguments) -> str:
    """The flag that selects one of our schedules."""
    if a.vocab_parallel:
        return "--vocab-parallel"
    offloads = a.pipeline_schedule == DEFAULT_SCHEDULE
    return f"--offload-chunks {a.offload_chunks}" if offloads else f"--pipeline-schedule {a.pipeline_schedule}"


def _words(a: Arguments) -> dict[str, Any]:
    """What the placeholders of messages stand for."""
    family, rows = run_settings(a).family, a.vocab_rows or (1,) * a.pipeline_model_parallel_size
    return {
        **vars(a),
        "file": family.fixed,
        "row_holders": tuple(rank for rank, count in enumerate(rows) if count),
        "microbatches": family.fixed and a.global_batch_size // (a.micro_batch_size * a.data_parallel_size),
        "transformer_engine_version": get_te_version(),
        "our_schedule": _asked(a),
        "own_chunks": family.chunks or "2 or more",
        "chunks": _chunks(a),
    }


def values_of(a: Arguments) -> Callable[[str], Any]:
    """The value of an argument by its long name. An option without value counts as set if it was given, because
    `settle` may have reset it, and Megatron may store it under another name.
    """

    def value(name: str) -> Any:
        found = getattr(a, OTHER_NAMES.get(name, name), None)
        return (_typed(name) or None) if found is None or found is False else found

    return value


def _typed(name: str) -> bool:
    return option_of(name) in process.words.options


def _chunks_differ(a: Arguments) -> bool:
    """Whether chunks have different numbers of layers. Without a layout, Megatron divides the layers evenly."""
    layout = a.pipeline_model_parallel_layout
    uneven = layout is not None and len(set(layers_in(str(layout)))) > 1
    return _chunks(a) > 1 and bool(uneven or a.hybrid_layer_pattern or a.mtp_num_layers)


def _ends_in_experts(a: Arguments) -> bool:
    """Whether the last layer has experts; --moe-layer-freq is a list, or the distance of layers that have."""
    every = a.moe_layer_freq
    return bool(every[-1] if isinstance(every, list) else (a.num_layers - 1) % every == 0)


def _properties(a: Arguments) -> dict[str, Any]:
    """Which keys of RUNS hold for a run."""
    settings = run_settings(a)
    elsewhere = not settings.family.ends_on_last_rank
    return {
        UNREAD: True,
        "any run": True,
        "Megatron's schedule": not settings.replaces_schedule,
        "our schedules": settings.replaces_schedule,
        "vocabulary shards": a.vocab_parallel,
        "W": settings.splits_backward,
        "W of Transformer Engine": _delays_weights(a),
        "V": elsewhere,
        "uneven chunks": settings.replaces_schedule and a.fp8 and _chunks_differ(a),
        "moved weights": a.vocab_parallel or settings.places_chunks,
        "offload": settings.offloads,
        "a dense last layer": not settings.replaces_schedule and bool(a.num_layers) and not _ends_in_experts(a),
        "schedule without pairs": settings.replaces_schedule and not settings.family.has_pairs,
        "sdpa": a.core_attention == "sdpa",
        "V without shards": elsewhere and not a.vocab_parallel,
        "vocabulary passes": VocabMethod.NONE not in settings.family.methods,
        "pattern without heads": a.vocab_parallel and "/" not in (a.hybrid_layer_pattern or "/"),
    } | {name: lacks(name[3:].replace("-", "_")) for name in RUNS if name.startswith("no ")}


def _said(a: Arguments, warnings: bool) -> Iterator[str]:
    """The messages of all records in OPTIONS that apply to validated arguments: either warnings or refusals."""
    holds = _properties(a)
    ours = f"--pipeline-schedule {a.pipeline_schedule}{' and --vocab-parallel' * a.vocab_parallel}"
    for option in OPTIONS:
        unread = option.run == UNREAD
        applies = holds.get(option.run) and (unread or bool(option.does)) == warnings
        if applies and (called := option.found(_typed if unread else values_of(a))):
            yield option.message(called, ours)


def refuse(args: Arguments) -> None:
    """Raise UserError for the first option or combination that excludes a run with validated arguments."""
    words = _words(args)
    combined = (REFUSALS[name] for name, applies in _faults(args, words).items() if applies)
    _refuse(message.format_map(words) for message in chain(_said(args, warnings=False), combined))


def warnings_of(args: Arguments) -> tuple[str, ...]:
    """Return a sentence for each option in validated arguments that does not have its intended effect."""
    one_queue = (
        os.environ.get(ONE_QUEUE) == "1"
        and args.distributed_backend == "nccl"
        and args.tensor_model_parallel_size == args.context_parallel_size == 1  # Otherwise, Megatron requires it.
        and (args.vocab_parallel or run_settings(args).offloads)
    )
    blocks = (
        f"{ONE_QUEUE}=1 lets a collective or copy that waits block all passes issued after it, because all streams "
        "share one hardware queue: unset the variable, which only tensor and context parallelism need"
    )
    return (*_said(args, warnings=True), *filter(None, [one_queue and blocks, one_way(args)]))


def check_given(args: Arguments) -> None:
    """Raise UserError for a size in parsed arguments that is out of range, for another infinite number, and for flags
    that are meant to replace the data or the batch size of a configuration file but clash with it.
    """
    iterations_in(args.pipeline_trace_iterations)
    _refuse(f"{option_of(name)} {fault}" for name, value in vars(args).items() if (fault := out_of_range(name, value)))
    two_batches = args.step_batch_size_schedule and args.global_batch_size
    clashes = ((two_batches, TWO_BATCHES), (args.mock_data and args.data_path, MOCK_DATA))
    _refuse(message for clash, message in clashes if clash)


def _refuse(reasons: Iterable[str]) -> None:
    for reason in reasons:
        raise UserError(reason)


MOCK_DATA = (
    "--mock-data replaces neither the job's data_path nor its tokenizer: leave --mock-data out, or add --config "
    "data/mock, which replaces both"
)


def refuse_script_options(args: Arguments) -> None:
    """Raise UserError for an option in `args` that `pretrain_gpt_vp.py` does not implement."""
    values = values_of(args)
    of_script = (option for option in OPTIONS if option.run == "our script")
    _refuse(option.message(called, "") for option in of_script if (called := option.found(values)))


def refuse_no_data(args: Arguments) -> None:
    """Raise UserError if no argument names the data of `pretrain_gpt_vp.py`."""
    if not any(getattr(args, name) for name in ROLES["data"][:5]):
        raise UserError(
            "the job has no data: add --data-path PREFIX (`megatron-vp data` writes a dataset), or --mock-data to "
            "train on random tokens"
        )
