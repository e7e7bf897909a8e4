"""Finds where to cut a hybrid model's pattern so that the busiest rank has as little work as possible.

Each letter of the pattern is one layer, and different letters mean different amounts of work. A cut says how many
letters each virtual stage gets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from megatron_vp.cost.layers.layer_types import layer_kinds
from megatron_vp.cost.planning.layer_choices import LayerChoice, layer_choices
from megatron_vp.cost.ranks.communication import CommunicationModel
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.schedule import Placement

_HALVINGS = 50
"""Bisection steps in the search for the least possible work of the busiest rank."""

_LONGEST_MOVE = 8
"""Largest number of neighbouring stage boundaries that are moved together."""

_BETTER = 1 - 1e-9
"""A move is an improvement only if it reduces an objective below this fraction of its old value. This excludes mere
rounding errors.
"""


def letter_seconds(times: PassTimes) -> list[float]:
    """Seconds that all passes of one microbatch take in each layer of the job's pattern."""
    job = times.job
    traffic = CommunicationModel(job, times.hardware)
    kinds = layer_kinds(job, job.model.layers)
    took = {kind: sum(times.layer(kind)) + 2 * traffic.layer_traffic(kind) for kind in set(kinds)}
    return [took[kind] for kind in kinds]


def even_cut(
    work: Sequence[float],
    placement: Placement,
    extra: Sequence[float] | None = None,
    may_be_empty: Collection[int] = (),
) -> tuple[int, ...] | None:
    """Find the cut that minimises the busiest rank's work. Return each virtual stage's number of letters, or None if
    there are too few letters.

    Args:
        work: work of every letter.
        extra: other work of every rank.
        may_be_empty: virtual stages that may have no letters.

    With one chunk per rank, the result is optimal. With several, it may be only a local optimum: the objective (see
    `_Cuts.figures`) does not improve if at most _LONGEST_MOVE neighbouring stage boundaries are moved by one letter.
    """
    least = [int(stage not in may_be_empty) for stage in range(placement.stages)]
    if sum(least) > len(work):
        return None
    extra = list(extra or [0.0] * placement.ranks)
    cuts = _Cuts(work, placement, extra, least)
    starts = [cuts.by_target()]
    if placement.chunks == 1:
        starts.append(cuts.by_level())
    found = min(map(cuts.improved, starts), key=cuts.figures)
    return tuple(end - start for start, end in pairwise(found))


class _Cuts:
    """Finds cuts of one pattern. Here, a cut lists positions in the pattern: 0, followed by the end of each stage."""

    def __init__(
        self, work: Sequence[float], placement: Placement, extra: Sequence[float], least: Sequence[int]
    ) -> None:
        self.placement, self.extra, self.least = placement, extra, least
        self.sums = [0.0, *accumulate(work)]
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.needed_after = [*list(accumulate(least[::-1]))[::-1][1:], 0]

    def loads(self, ends: Sequence[int]) -> list[float]:
        loads = list(self.extra)
        for stage, (start, end) in enumerate(pairwise(ends)):
            loads[self.rank_of[stage]] += self.sums[end] - self.sums[start]
        return loads

    def figures(self, ends: Sequence[int]) -> tuple[float, float]:
        """The objective as a pair: the busiest rank's work, and the sum of the squares of all ranks' work."""
        loads = self.loads(ends)
        return max(loads), sum(each * each for each in loads)

    def by_target(self) -> list[int]:
        """The cut whose stages end as close as possible to where they would end if all ranks had equal work."""
        level = _level(self.extra, self.sums[-1])
        ends, reached = [0], 0.0
        for stage, needed in enumerate(self.needed_after):
            reached += max(0.0, level - self.extra[self.rank_of[stage]]) / self.placement.chunks
            place = bisect_left(self.sums, reached)
            if place and (place == len(self.sums) or reached - self.sums[place - 1] <= self.sums[place] - reached):
                place -= 1
            ends.append(max(ends[-1] + self.least[stage], min(place, len(self.sums) - 1 - needed)))
        ends[-1] = len(self.sums) - 1
        return ends

    def by_level(self) -> list[int]:
        """The cut that minimises the busiest rank's work and fills earlier ranks first. Requires one chunk per rank."""
        low, high = 0.0, max(self.extra) + self.sums[-1]
        found = self._below(high)
        assert found is not None
        for _ in range(_HALVINGS):
            level = (low + high) / 2
            tried = self._below(level)
            low, high, found = (level, high, found) if tried is None else (low, level, tried)
        return found

    def _below(self, level: float) -> list[int] | None:
        """A cut in which no rank's work exceeds `level`; None if no such cut exists."""
        ends = [0]
        for stage in range(len(self.least)):
            end = self._fullest(stage, ends[-1], level)
            if end < ends[-1] + self.least[stage]:
                # The rank's work exceeds `level` even if the stage has only its first letter. If earlier stages ended
                # sooner, the stage would start with another letter, which may mean less work.
                return self._below_by_all(level)
            ends.append(end)
        return ends if ends[-1] == len(self.sums) - 1 else None

    def _fullest(self, stage: int, start: int, level: float) -> int:
        """The last possible end of a stage that begins at `start` and keeps its rank's work within `level`."""
        room = self.sums[start] + level - self.extra[self.rank_of[stage]]
        return min(bisect_right(self.sums, room) - 1, len(self.sums) - 1 - self.needed_after[stage])

    def _below_by_all(self, level: float) -> list[int] | None:
        """Like `_below`, but tries all cuts. Bit i of `possible[s]` says whether stage s can start at letter i."""
        possible = [1]
        for stage, least in enumerate(self.least):
            ends = 0
            for start in _bits(possible[-1]):
                ends |= (1 << max(self._fullest(stage, start, level) + 1, start + least)) - (1 << (start + least))
            if not ends:
                return None
            possible.append(ends)
        found = [len(self.sums) - 1]
        if not possible[-1] >> found[0]:
            return None
        for stage in range(len(self.least) - 1, -1, -1):
            starts = [
                start
                for start in _bits(possible[stage])
                if start + self.least[stage] <= found[0] <= self._fullest(stage, start, level)
            ]
            found.insert(0, starts[-1])
        return found

    def improved(self, ends: list[int]) -> list[int]:
        """Repeatedly move one or several neighbouring stage boundaries by one letter, until no such move improves the
        cut.
        """
        while (better := self._moved(ends)) is not None:
            ends = better
        return ends

    def _moved(self, ends: list[int]) -> list[int] | None:
        """The cut after the first move that helps; None if no move does."""
        loads, sums, last = self.loads(ends), self.sums, len(ends) - 1
        most, squares = max(loads), sum(each * each for each in loads)
        for count in range(1, min(_LONGEST_MOVE, last - 1) + 1):
            for first in range(1, last - count + 1):
                before, after = first - 1, first + count - 1  # Only these two stages gain or lose a letter.
                for step in (-1, 1):
                    if (ends[first] + step - ends[before] < self.least[before]) or (
                        ends[after + 1] - ends[after] - step < self.least[after]
                    ):
                        continue
                    tried = [*ends[:first], *(end + step for end in ends[first : after + 1]), *ends[after + 1 :]]
                    moved = loads.copy()
                    for stage in range(before, after + 1):
                        own = sums[tried[stage + 1]] - sums[tried[stage]] - sums[ends[stage + 1]] + sums[ends[stage]]
                        moved[self.rank_of[stage]] += own
                    found = max(moved)
                    if found > most:
                        continue
                    if found < _BETTER * most or sum(each * each for each in moved) < _BETTER * squares:
                        return tried
        return None


def _bits(number: int) -> list[int]:
    """Positions of the set bits of `number`, in ascending order."""
    return [place for place in range(number.bit_length()) if number >> place & 1]


def _level(extra: Sequence[float], work: float) -> float:
    """The level to which `work` raises the least loaded ranks; `extra`: each rank's load without `work`."""
    level, lower = 0.0, sorted(extra)
    for count in range(1, len(lower) + 1):
        level = (work + sum(lower[:count])) / count
        if count == len(lower) or level <= lower[count]:
            break
    return level


def unit_length(pattern: str) -> int:
    """The period of the pattern in letters, such as 2 for alternating attention and MLP; 0 without a pattern."""
    if not pattern:
        return 0
    return next(
        size
        for size in range(1, len(pattern) + 1)
        if not len(pattern) % size and pattern == pattern[:size] * (len(pattern) // size)
    )


def pattern_choices(times: PassTimes, placement: Placement, cost: Sequence[float]) -> list[list[LayerChoice]]:
    """List candidate cuts for uneven shards, as `layer_choices` does for models without a pattern.

    The first group contains only the most even cut, in which any rank may hold rows. In the next two groups, as in the
    last two of `layer_choices`, only some ranks hold rows. If the pattern is a repeated unit, more groups follow: the
    result of `layer_choices` with whole units in place of layers.
    """
    work, p = letter_seconds(times), placement.ranks
    everyone, units = tuple(range(p)), len(cost) - 1
    even = even_cut(work, placement)
    groups = [] if even is None else [[LayerChoice(even, everyone)]]
    at_the_start: list[LayerChoice] = []
    at_the_end: list[LayerChoice] = []
    for count in range(1, p):
        share, step = cost[-(-units // count)], sum(work) / len(work) / 2
        for each in (share - step, share, share + step):
            if each <= 0:
                continue
            for group, holders in ((at_the_start, everyone[:count]), (at_the_end, everyone[p - count :])):
                cut = even_cut(work, placement, [each if rank in holders else 0.0 for rank in everyone])
                if cut is not None:
                    group.append(LayerChoice(cut, holders))
    groups += [group for group in (at_the_start, at_the_end) if group]
    size = unit_length(times.job.model.pattern)
    if 1 < size < len(work) and len(work) // size >= placement.stages:
        whole = layer_choices(len(work) // size, placement, sum(work[:size]), cost)
        groups += [[LayerChoice(tuple(size * n for n in one.layers), one.holders) for one in group] for group in whole]
    return groups
