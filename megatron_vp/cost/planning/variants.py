"""Lists the ways of distributing a job over GPUs, for a search to compare."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.cost.planning.candidates import LARGEST, placed_heads
from megatron_vp.errors import UserError
from megatron_vp.jobs.pattern_text import pattern_in

MICRO_BATCHES = (1, 2, 4, 8)
"""Microbatch sizes, in sequences, that a search tries."""

CONTEXT_TOKENS = 4096
"""A search splits sequences over context-parallel ranks only if each gets at least this many tokens. With fewer,
attention cannot hide the exchange of keys and values.
"""

DIMENSIONS = {
    "tensor": ("tensor_model_parallel_size",),
    "context": ("context_parallel_size",),
    "pipeline": ("pipeline_model_parallel_size",),
    "expert": ("expert_model_parallel_size",),
    "micro-batch": ("micro_batch_size",),
    "recompute": ("recompute_granularity", "recompute_method", "recompute_num_layers"),
}
"""The dimensions that a search varies, each with its Megatron arguments. Data parallelism uses the remaining GPUs."""

SPLITTING = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
"""Arguments that split a replica over GPUs."""


@dataclass(frozen=True)
class Variant:
    """A job distributed over all GPUs.

    settings: the arguments to change in the job's configuration; empty for the job as configured.
    """

    job: Job
    settings: dict[str, Any]


def variants(
    arguments: Mapping[str, Any], gpus: int | None, hardware: Hardware, keep: Collection[str] = ()
) -> list[Variant]:
    """All ways to distribute the job of `arguments` over `gpus` GPUs; `keep` names the dimensions that do not vary.

    The first variants have the job's own sizes, if these allow `gpus` GPUs. In all other
    variants, each tensor-parallel group lies within one node and uses sequence parallelism. Combinations of sizes that
    the model or the global batch size does not allow are left out. Raises UserError if the arguments have no global
    batch size, or if no combination is left.
    """
    if gpus is None:
        raise UserError("--search needs the size of the cluster: give the number of nodes with --nodes")
    for name in keep:
        if name not in DIMENSIONS:
            raise UserError(f"--keep {name} is not a setting that --search varies; use {', '.join(DIMENSIONS)}")
    if arguments.get("global_batch_size") is None:
        raise UserError("a search needs a fixed global batch size: set --global-batch-size")
    # Errors that do not depend on the searched sizes, such as a missing hidden size, are raised here.
    varied = {name for names in DIMENSIONS.values() for name in names}
    job_of({name: value for name, value in arguments.items() if name not in varied} | {"micro_batch_size": 1})
    reason = f"the product of the parallel sizes fixed by --keep {', '.join(keep)} does not divide the number of GPUs"
    found = []
    for sizes in _sizes(arguments, gpus, hardware, keep):
        settings = sizes | {"sequence_parallel": sizes["tensor_model_parallel_size"] > 1}
        try:
            job = job_of(dict(arguments) | settings, gpus)
        except UserError as error:
            reason = f"the last one tried was refused: {error}"
            continue
        found += [Variant(each, settings) for each in placed_heads(job)]
    if not found:
        raise UserError(f"no combination of parallel sizes runs this job on {gpus} GPUs: {reason}")
    try:
        own = placed_heads(job_of(arguments, gpus))
    except UserError:
        return found
    return [*(Variant(job, {}) for job in own), *(each for each in found if each.job not in own)]


def _sizes(
    arguments: Mapping[str, Any], gpus: int, hardware: Hardware, keep: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the searched sizes that use all GPUs."""
    experts, sequence, layers = (arguments.get(name) or 0 for name in ("num_experts", "seq_length", "num_layers"))
    pattern = pattern_in(arguments)
    if pattern is not None:
        layers = len(pattern.letters)
    powers = [2**power for power in range(gpus.bit_length())]
    tried: dict[str, Iterable[tuple[Any, ...]]] = {
        "tensor": [(size,) for size in powers if size <= hardware.gpus_per_node],
        "context": [(size,) for size in powers if size == 1 or sequence // size >= CONTEXT_TOKENS],
        "expert": [(size,) for size in powers if size == 1 or (experts and experts % size == 0)],
        "micro-batch": [(size,) for size in MICRO_BATCHES],
        "recompute": [(None, None, None), ("full", "uniform", 1)],
        "pipeline": [(size,) for size in range(1, min(layers, LARGEST, gpus) + 1)],
    }
    for dimension in keep:
        otherwise = None if dimension == "recompute" else 1
        tried[dimension] = [tuple(arguments.get(name) or otherwise for name in DIMENSIONS[dimension])]
    names = [name for dimension in tried for name in DIMENSIONS[dimension]]
    for sizes in product(*tried.values()):
        found = dict(zip(names, (value for values in sizes for value in values), strict=True))
        split = math.prod(found[name] for name in SPLITTING)
        if gpus % split == 0 and gpus // split % found["expert_model_parallel_size"] == 0:
            yield found
