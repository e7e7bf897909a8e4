"""Compare the spans and peaks of PipeOffload's schedules with those of its authors' published generator.

There is one setting: F, B and W take one unit of time per chunk; 4p microbatches; copies on one lane; peaks in
activations of one chunk. `k` is the round trip of a chunk's copies divided by its F + B + W.
"""

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, generate, simulate

ON_THE_DEVICE = {
    ("gis", 4, 2): (102, 8),
    ("gis", 4, 4): (198, 16),
    ("gis", 8, 2): (206, 16),
    ("gis-h", 4, 2): (104, 6),
    ("gis-h", 4, 4): (204, 10),
    ("gis-h", 8, 2): (210, 12),
    ("po", 4, 2): (105, 7),
    ("po", 4, 3): (158, 8),
    ("po", 4, 4): (210, 11),
    ("po", 8, 2): (215, 13),
    ("interleaved", 4, 2): (105, 11),
    ("interleaved", 4, 4): (201, 19),
    ("interleaved", 8, 2): (213, 23),
    ("1f1b", 4, 1): (57, 4),
    ("1f1b", 8, 1): (117, 8),
}
"""Their span and the device's peak by schedule, p and v, with no chunk offloaded."""

OFFLOADED = {
    ("po", 4, 2, 0.5): (105, (7, 4, 3)),
    ("po", 4, 4, 0.5): (210, (11, 8, 5, 4, 3)),
    ("po", 8, 2, 0.5): (215, (13, 6, 3)),
    ("po", 4, 2, 1.0): (106.5, (7, 4, 4)),
    ("po", 4, 4, 1.0): (210, (11, 8, 5, 4, 4)),
    ("po", 8, 2, 1.0): (215, (13, 6, 6)),
    ("po", 4, 3, 1.0): (160, (8, 6, 4, 4)),
    ("po", 6, 2, 1.0): (161.5, (9, 5, 5)),
}
"""Their span, of several the shortest that is known, and the device's peak with 0, 1, ..., v chunks offloaded; None:
they give up, or it is not known.
"""

HOST = {(4, 2): (5, 7), (4, 4): (8, 11), (8, 2): (9, 13), (8, 4): (17, 23)}
"""Their peak of `po` on the host by p and v, with half and all chunks offloaded, for k = 0.5."""

GIVE_UP = (
    ("po", 8, 2, 0.9, 1),
    ("po", 7, 2, 1.0, 1),
)
"""Schedule, p, v, k and offloaded chunks for which their generator gives up; it does so for every odd p."""


def cases():
    """Each case, as `ours` takes it, with their span, peak on the device and peak on the host; None: not known."""
    for (name, p, v), theirs in ON_THE_DEVICE.items():
        yield (name, p, v, 0.0, 0), (*theirs, None)
    for (name, p, v, k), (span, peaks) in OFFLOADED.items():
        hosts = HOST[p, v] if name == "po" and k == 0.5 and (p, v) in HOST else (None, None)
        for count, peak in enumerate(peaks):
            yield (name, p, v, k, count), (span, peak, dict(zip(((v + 1) // 2, v), hosts, strict=True)).get(count))
    for case in GIVE_UP:
        yield case, (None, None, None)


def ours(name, p, v, k, count):
    """Span, peak on the device and peak on the host."""
    costs = PassCosts(F=v, B=v, W=v, other={"copy": k * 3 * v / 2})
    chunks = v if FAMILIES[name].chunks is None else None
    timeline = simulate(generate(name, p, 4 * p, chunks=chunks, costs=costs, offload_chunks=count), costs)
    return timeline.makespan, v * max(timeline.peak_activation), v * max(timeline.peak_host)


def at_most(found, theirs):
    return all(other is None or own <= other + 1e-6 for own, other in zip(found, theirs, strict=True))


def test_spans_and_peaks_are_at_most_the_authors():
    for case, theirs in cases():
        assert at_most(ours(*case), theirs), case


@pytest.mark.parametrize(("k", "left"), [(0.5, 2), (1.0, 3)])
@pytest.mark.parametrize("p", [4, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_all_chunks_offloaded_leave_a_constant(p, k, left):
    assert ours("po", p, 4, k, 4)[1] == left


@pytest.mark.parametrize("name", ["gis", "gis-h", "po"])
def test_passes_of_a_microbatch_have_slots_of_their_own_in_the_steady_state(name):
    for p in range(2, 14):
        for v in range(2, 9):
            block = FAMILIES[name].block(p, v, PassCosts(F=v, B=v, W=v))
            period = 3 * v * block.group
            for stages in block.placement.stage_of:
                starts = [times[s] for s in stages for times in (block.forward, block.backward, block.weight)]
                slots = {round(start + 3 * place) % period for start in starts for place in range(block.group)}
                assert len(slots) == period, (p, v)
