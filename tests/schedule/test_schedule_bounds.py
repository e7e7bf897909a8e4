"""Test the lengths of schedules at default costs: closed forms, published makespans, steady state."""

import pytest

from megatron_vp.schedule import FAMILIES, PassCosts, evaluation, generate, simulate

SHARDED = ["vocab-1", "vocab-2"]
REORDERED = [name for name, family in FAMILIES.items() if family.block]
WORK, BASE_WORK = 3.6, 3.0


def makespan(name, p, m, **options):
    return simulate(generate(name, p, m, **options), options.get("costs")).makespan


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("vocab", SHARDED)
def test_1f1b_pays_its_fill_and_drain_without_vocabulary_work(p, vocab):
    fill = (p - 1) * BASE_WORK + 0.25 + (1 if vocab == "vocab-1" else 0)
    for m in sorted({1, 2, p - 1, p, p + 1, 2 * p + 1, 4 * p}):
        assert makespan("1f1b", p, m, vocab=vocab) <= m * WORK + fill + 1e-9, m


@pytest.mark.parametrize(
    ("name", "p", "m", "vocab", "published"),
    [
        ("1f1b", 8, 32, "vocab-1", 135.6),
        ("1f1b", 8, 32, "vocab-2", 135.6),
        ("v-half", 8, 32, "vocab-1", 129.1),
        ("v-half", 8, 32, "vocab-2", 128.15),
        ("v-half", 16, 128, "none", 404.5),
    ],
)
def test_published_sizes_take_no_longer_than_the_authors_orders(name, p, m, vocab, published):
    assert makespan(name, p, m, vocab=vocab) <= published + 1e-9


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_plain_schedules_take_the_known_times(p, groups):
    m = groups * p
    fill = {
        "1f1b": 3 * (p - 1),  # F + B + W
        "zb-h1": p - 1,  # F + B - W
        "zb-v": (p - 1) / 2,  # F of a chunk
        "interleaved": 3 * (p - 1) / 2,  # F + B + W of a chunk
    }
    for name, expected in fill.items():
        assert makespan(name, p, m) == pytest.approx(m * BASE_WORK + expected), name


def test_interlaced_pays_its_fill_and_drain_without_vocabulary_work():
    for p in (2, 3, 8, 9):
        for m in (1, p, 4 * p):
            assert makespan("interlaced", p, m) <= m * WORK + (p - 1) * BASE_WORK + 1e-9, (p, m)


@pytest.mark.parametrize(
    ("p", "name"),
    [(4, name) for name in REORDERED] + [pytest.param(16, name, marks=pytest.mark.slow) for name in ("gis", "v-half")],
)
def test_vocabulary_passes_cost_next_to_nothing_beyond_their_work(name, p):
    # An interval a barrier, 3.6 and 7.2, would be explained; the squeezed passes fill more gaps than they open.
    m, most = 4 * p, 2.2 if name == "dualpipe-v" else 0.5
    plain = makespan(name, p, m) - m * BASE_WORK
    for vocab in SHARDED:
        assert makespan(name, p, m, vocab=vocab) - m * WORK <= plain + most, vocab


@pytest.mark.parametrize("name", FAMILIES)
def test_one_more_microbatch_costs_its_work_and_no_more(name):
    # V-Min has no slack for passes that differ.
    costs, p = PassCosts() if name == "v-min" else PassCosts(F=0.9, B=1.1, W=0.7, S=0.1), 6
    for vocab in ["none"] if name == "interlaced" else ["none", "vocab-1"]:
        work = costs.F + costs.B + costs.W
        if vocab != "none" or name == "interlaced":
            work += costs.S + costs.T + costs.IF + costs.IB
        # With 48 microbatches V-Min happens upon an order that is shorter by a third of an interval.
        sizes = (72, 96) if name == "v-min" else (36, 48)
        times = [makespan(name, p, m, vocab=vocab, costs=costs) for m in sizes]
        assert times[1] - times[0] == pytest.approx((sizes[1] - sizes[0]) * work, rel=1e-3), vocab


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation_does_not_wait_for_the_order_of_training(name):
    costs = PassCosts()
    for p, m in ((3, 7), (4, 16)):
        for vocab in ["none"] if name == "interlaced" else ["none", *SHARDED]:
            work = costs.F + (costs.IF + costs.S if vocab != "none" or name == "interlaced" else 0)
            schedule = evaluation(generate(name, p, m, vocab=vocab))
            assert simulate(schedule).makespan <= m * work + (p - 1) * costs.F + 1e-9, (p, m, vocab)
