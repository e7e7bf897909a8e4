"""Compare the spans and peaks of PipeOffload's schedules with those of its authors' published generator.

There is one setting: F, B and W take one unit of time per chunk; 4p microbatches; copies on one lane; peaks in
activations of one chunk. `k` is the round trip of a chunk's copies divided by its F + B + W.
"""

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, generate, simulate

ON_THE_DEVICE = {
    ("gis", 4, 2): (102, 8),
    ("gis", 4, 4): (198, 16),
    ("gis", 4, 8): (390, 32),
    ("gis", 8, 2): (206, 16),
    ("gis", 8, 4): (398, 32),
    ("gis-h", 4, 2): (104, 6),
    ("gis-h", 4, 4): (204, 10),
    ("gis-h", 4, 8): (404, 18),
    ("gis-h", 8, 2): (210, 12),
    ("gis-h", 8, 4): (410, 20),
    ("po", 4, 2): (105, 7),
    ("po", 4, 3): (158, 8),
    ("po", 4, 4): (210, 11),
    ("po", 4, 5): (263, 12),
    ("po", 4, 6): (315, 15),
    ("po", 4, 8): (419, 19),
    ("po", 8, 2): (215, 13),
    ("po", 8, 3): (322, 16),
    ("po", 8, 4): (425, 23),
    ("po", 8, 5): (536, 24),
    ("po", 8, 6): (642, 29),
    ("po", 8, 8): (855, 39),
    ("interleaved", 4, 2): (105, 11),
    ("interleaved", 4, 4): (201, 19),
    ("interleaved", 8, 2): (213, 23),
    ("interleaved", 8, 4): (405, 39),
    ("1f1b", 4, 1): (57, 4),
    ("1f1b", 8, 1): (117, 8),
}
"""Their span and the device's peak by schedule, p and v, with no chunk offloaded."""

OFFLOADED = {
    ("po", 4, 2, 0.5): (105, (7, 4, 3)),
    ("po", 4, 4, 0.5): (210, (11, 8, 5, 4, 3)),
    ("po", 8, 2, 0.5): (215, (13, 6, 3)),
    ("po", 8, 4, 0.5): (425, (23, 15, 9, 5, 3)),
    ("po", 4, 2, 1.0): (106.5, (7, 4, 4)),
    ("po", 4, 4, 1.0): (210, (11, 8, 5, 4, 4)),
    ("po", 8, 2, 1.0): (215, (13, 6, 6)),
    ("po", 8, 4, 1.0): (425, (23, 15, 9, 5, None)),
    ("po", 4, 3, 1.0): (160, (8, 6, 4, 4)),
    ("po", 6, 2, 1.0): (161.5, (9, 5, 5)),
    ("po", 6, 4, 1.0): (323, (15, 10, 7, 5, 5)),
    ("po", 8, 3, 1.0): (323.5, (16, 10, 6, 6)),
    ("po", 8, 8, 1.0): (865, (39, 31, 24, 18, 13, 9, 6, 5, 6)),
    ("po", 12, 3, 0.5): (484, (26, 14, 6, 3)),
    ("po", 16, 2, 1.0): (437, (25, 10, 8)),
    ("po", 16, 4, 0.5): (861, (43, 27, 15, 7, 3)),
    ("gis", 8, 4, 0.5): (None, (32, None, 16, None, None)),
}
"""Their span, of several the shortest that is known, and the device's peak with 0, 1, ..., v chunks offloaded; None:
they give up, or it is not known.
"""

HOST = {(4, 2): (5, 7), (4, 4): (8, 11), (8, 2): (9, 13), (8, 4): (17, 23)}
"""Their peak of `po` on the host by p and v, with half and all chunks offloaded, for k = 0.5."""

GIVE_UP = (
    ("po", 8, 2, 0.9, 1),
    ("po", 8, 4, 1.0, 4),
    ("gis", 8, 4, 0.5, 4),
    ("po", 5, 4, 0.5, 4),
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


def test_spans_and_peaks_of_small_cases_are_at_most_the_authors():
    small = [(case, theirs) for case, theirs in cases() if case[1] * case[2] <= 16]
    assert len(small) > 40
    for case, theirs in small:
        assert at_most(ours(*case), theirs), case


@pytest.mark.slow
def test_spans_and_peaks_of_every_case_are_at_most_the_authors():
    """Prints all of them: see them with `-s`."""
    row = "{:12}{:>3}{:>3}{:>5}{:>7}" + 3 * "{:>10}{:>7}"
    print("\n" + row.format("schedule", "p", "v", "k", "chunks", "span", "", "device", "", "host", "theirs"))
    over = []
    for case, theirs in cases():
        found = ours(*case)
        pairs = [text for own, other in zip(found, theirs, strict=True) for text in (f"{own:g}", f"{other or '-'}")]
        print(row.format(*case, *pairs))
        over += [] if at_most(found, theirs) else [case]
    assert not over


@pytest.mark.parametrize(("k", "left"), [(0.5, 2), (1.0, 3)])
@pytest.mark.parametrize("p", [4, 8, 16, pytest.param(32, marks=pytest.mark.slow)])
def test_all_chunks_offloaded_leave_a_constant(p, k, left):
    assert ours("po", p, 4, k, 4)[1] == left
