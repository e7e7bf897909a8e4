"""The schedules by name. A family is one file with one function that returns its building block.

`interlaced` alone is ordered by hand: a pass that all ranks run at the same time leaves nothing to reorder.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from megatron_vp.errors import UserError
from megatron_vp.schedule.blocks import BuildingBlock, refuse_chunks
from megatron_vp.schedule.collector import collector_paused
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.generators.interlaced import interlaced
from megatron_vp.schedule.generators.interleaved import interleaved
from megatron_vp.schedule.generators.one_f_one_b import one_f_one_b
from megatron_vp.schedule.generators.v_half import v_half
from megatron_vp.schedule.generators.v_min import v_min
from megatron_vp.schedule.generators.zb_h1 import zb_h1
from megatron_vp.schedule.generators.zb_v import zb_v
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.squeeze import squeeze
from megatron_vp.schedule.vocab_passes import nominal_schedule

Family = Callable[[int, int | None, PassCosts], BuildingBlock]
"""(pipeline size, chunks or None for the family's own number, costs) -> building block. Raises UserError for chunks."""

FAMILIES: dict[str, Family] = {
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}

GENERATORS = (*FAMILIES, "interlaced")
"""Names that `generate` knows."""

V_SHAPED_SCHEDULES = ("zb-v", "v-half", "v-min")
"""Those whose first and last stage share a rank."""

LARGEST = 1_000_000
"""Ranks x microbatches x chunks: some three minutes on one core and 6 GB."""


@collector_paused()
def generate(
    name: str,
    pipeline_size: int,
    microbatches: int,
    *,
    vocab: VocabMethod | str = VocabMethod.NONE,
    chunks: int | None = None,
    costs: PassCosts | None = None,
) -> Schedule:
    """A complete schedule of family `name`, vocabulary passes included, ordered for `costs`.

    Raises UserError for an unknown family or vocabulary method, fewer than one rank or microbatch, vocabulary passes
    on fewer than two ranks, chunks that the family cannot have, and more than LARGEST forwards.
    """
    if name not in GENERATORS:
        near = difflib.get_close_matches(name, GENERATORS, 1, 0)
        raise UserError(f"schedule {name!r} is unknown; nearest is {near[0]!r}, known are {', '.join(GENERATORS)}")
    try:
        vocab = VocabMethod(vocab)
    except ValueError:
        raise UserError(f"vocab method {vocab!r} is unknown; use one of {', '.join(VocabMethod)}") from None
    if (name == "interlaced" and vocab.is_sharded) or (name != "interlaced" and vocab is VocabMethod.INTERLACED):
        raise UserError(
            f"vocab method {vocab} does not go with schedule {name}; interlaced has its own, the others none, vocab-1 "
            "or vocab-2"
        )
    least = 1 if name != "interlaced" and vocab is VocabMethod.NONE else 2
    if pipeline_size < least:
        raise UserError(
            f"pipeline size {pipeline_size} is too small for {name}, vocab method {vocab}; give at least {least}"
        )
    if microbatches < 1:
        raise UserError(f"{microbatches} microbatches make no schedule; give at least 1")
    if pipeline_size * microbatches * (chunks or 1) > LARGEST:
        size = f"{pipeline_size} ranks x {microbatches} microbatches" + (f" x {chunks} chunks" if chunks else "")
        raise UserError(
            f"{size} are more than {LARGEST:,} forwards, which would take "
            "minutes and gigabytes; fewer microbatches show the same steady state"
        )
    if name == "interlaced":
        refuse_chunks(name, chunks, 1)
        return interlaced(pipeline_size, microbatches)
    costs = costs or PassCosts()
    # The block's forwards are longer by the vocabulary work, so that its nominal times leave room for it.
    work = costs.S + costs.T + costs.IF + costs.IB if vocab.is_sharded else 0.0
    block = FAMILIES[name](pipeline_size, chunks, replace(costs, F=costs.F + work).without_zeros())
    return squeeze(*nominal_schedule(name, block, microbatches, vocab), costs)
