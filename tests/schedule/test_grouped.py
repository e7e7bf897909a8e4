"""Test GIS, GIS-H and PO: the building block, and the figures of PipeOffload's authors (arXiv 2503.01328, and its
code).
"""

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, ScheduleRequest, generate, lower, simulate
from megatron_vp.schedule.validate import validate

NAMES = ("gis", "gis-h", "po")
# Spans in passes of a chunk with 4p microbatches and F = B = W, and peaks in chunks, by (p, v), as their generator
# gives them for gis, gis-h and po.
THEIRS = {
    (4, 2): ((102, 8), (104, 6), (105, 7)),
    (4, 4): ((198, 16), (204, 10), (210, 11)),
    (4, 8): ((390, 32), (404, 18), (419, 19)),
    (8, 2): ((206, 16), (210, 12), (215, 13)),
    (8, 4): ((398, 32), (410, 20), (425, 23)),
}


@pytest.mark.parametrize(("p", "v"), THEIRS)
def test_spans_and_peaks_are_at_most_the_authors(p, v):
    costs = PassCosts(F=v, B=v, W=v)
    for name, (span, peak) in zip(NAMES, THEIRS[p, v], strict=True):
        timeline = simulate(generate(name, p, 4 * p, chunks=v, costs=costs), costs)
        assert timeline.makespan <= span + 1e-6, name
        assert max(timeline.peak_activation) * v <= peak + 1e-6, name
        if name == "gis":
            assert timeline.makespan == pytest.approx(12 * p * v + 2 * (p - 1))


def test_po_starts_where_the_authors_block_has_it():
    block = FAMILIES["po"].block(4, 4, PassCosts(F=4, B=4, W=4))
    assert [block.forward[4 * chunk] for chunk in range(4)] == [0, 6, 15, 21]
    assert [block.backward[4 * chunk] for chunk in range(4)] == [52, 46, 37, 31]
    assert [block.forward[4 * chunk + 3] for chunk in range(4)] == [5, 11, 20, 26]
    assert [block.backward[4 * chunk + 3] for chunk in range(4)] == [48, 42, 33, 27]


@pytest.mark.parametrize("name", NAMES)
def test_passes_of_a_microbatch_have_slots_of_their_own_in_the_steady_state(name):
    for p in range(2, 14):
        for v in range(2, 9):
            block = FAMILIES[name].block(p, v, PassCosts(F=v, B=v, W=v))
            period = 3 * v * block.group
            for stages in block.placement.stage_of:
                starts = [times[s] for s in stages for times in (block.forward, block.backward, block.weight)]
                slots = {round(start + 3 * place) % period for start in starts for place in range(block.group)}
                assert len(slots) == period, (p, v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 1), (3, 4, 7), (5, 3, 11), (7, 2, 9), (6, 8, 12)])
def test_any_number_of_ranks_chunks_and_microbatches_keeps_its_promise(name, p, v, m):
    for method in ("none", "vocab-1", "vocab-2"):
        schedule = generate(name, p, m, chunks=v, vocab=method)
        promised = ScheduleRequest.of(FAMILIES[name], p, m, chunks=v, method=schedule.vocab).promised_peaks
        validate(schedule, memory_bound=tuple(peak / v for peak in promised))
        assert len(lower(schedule)) == p
