"""Candidate layouts of layers for uneven vocabulary shards.

Holders are the ranks with vocabulary rows. A holder has fewer layers than the other ranks, to leave time for its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vp.cost.layers.layouts import by_stage
from megatron_vp.schedule import Placement


@dataclass(frozen=True)
class LayerChoice:
    """The number of transformer layers of every virtual stage, and the ranks that may hold vocabulary rows."""

    layers: tuple[int, ...]
    holders: tuple[int, ...]


def layer_choices(layers: int, placement: Placement, layer: float, cost: Sequence[float]) -> list[list[LayerChoice]]:
    """Candidate layouts of `layers` on `placement`, grouped by kind; every stage has at least one layer.

    The layouts that distribute the layers most evenly come first, each in a group of its own. In these layouts, any
    rank may hold vocabulary rows. There is one such layout if p divides the number of layers. Otherwise there are
    three: the ranks with one more layer are spread out, come first, or come last. Two more groups follow, with one
    layout for each feasible number of holders (ranks with rows) from 1 to p - 1. In one of these two groups, the
    holders are the first ranks of the pipeline. In the other, they are the last ranks.

    Args:
        layer: seconds of one layer in all passes of a microbatch.
        cost: seconds that 0, 1, 2, ... units of rows add to a rank's time; the last entry is for the whole vocabulary.
    """
    p = placement.ranks
    each, larger = divmod(layers, p)
    everyone = tuple(range(p))
    spread = [layers * (rank + 1) // p - layers * rank // p for rank in range(p)]
    first = [each + (rank < larger) for rank in range(p)]
    even = [spread] if not larger else [spread, first, first[::-1]]
    groups = [[LayerChoice(by_stage(counts, placement), everyone)] for counts in even]
    at_the_start, at_the_end = [], []
    for count in range(1, p):
        others = _layers_of_others(layers, p, count, placement.chunks, layer, cost)
        if others is None:
            continue
        each, larger = divmod(layers - (p - count) * others, count)
        counts = [*(each + (place < larger) for place in range(count)), *[others] * (p - count)]
        at_the_start.append(LayerChoice(by_stage(counts, placement), everyone[:count]))
        at_the_end.append(LayerChoice(by_stage(counts[::-1], placement), everyone[p - count :]))
    return [each for each in (*groups, at_the_start, at_the_end) if each]


def _layers_of_others(
    layers: int, ranks: int, holders: int, least: int, layer: float, cost: Sequence[float]
) -> int | None:
    """Choose how many layers each rank without rows gets, to minimise the busiest rank's work; None if impossible.

    The remaining layers are divided as evenly as possible over the `holders` ranks with rows. The rows are divided so
    that these ranks take equally long.
    """
    units = len(cost) - 1
    best = None
    for others in range(least, (layers - least * holders) // (ranks - holders) + 1):
        rest = layers - others * (ranks - holders)
        busiest = max(others * layer, -(-rest // holders) * layer, rest * layer / holders + cost[-(-units // holders)])
        if best is None or busiest < best[0]:
            best = busiest, others
    return None if best is None else best[1]
