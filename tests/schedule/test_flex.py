"""Test V-Flex: it respects any limit, is no longer than neighbouring families, and no longer with more memory."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    PassCosts,
    ScheduleRequest,
    VocabMethod,
    evaluation,
    from_json,
    generate,
    simulate,
    to_json,
)
from megatron_vp.schedule import flex as module
from megatron_vp.schedule.flex import fitted, shaped
from megatron_vp.schedule.validate import validate

BASES = ("v-min", "v-half", "zb-v", "dualpipe-v")
UNEVEN = PassCosts(F=1, B=1.9, W=0.7)


def spans(p, m, method, costs, limits):
    """Peak and makespan for each limit; None where nothing reaches it."""
    found = []
    for limit in limits:
        try:
            schedule = generate("v-flex", p, m, vocab=method, costs=costs, activation_limit=limit)
        except UserError as error:
            assert "give at least" in str(error)
            found.append(None)
            continue
        timeline = validate(schedule, costs)
        found.append((max(timeline.peak_activation), timeline.makespan))
    return found


def assert_keeps_its_promises(job):
    p, m, method, (forward, backward, weight), comm = job
    costs = PassCosts(F=forward, B=backward, W=weight, comm=comm)
    bases = []
    for name in BASES:
        timeline = simulate(generate(name, p, m, vocab=method, costs=costs), costs)
        bases.append((max(timeline.peak_activation), timeline.makespan))
    limits = sorted({peak for peak, _ in bases} | {p / 3 + k / 2 for k in range(0, 2 * p, max(1, p // 3))})
    shortest = float("inf")
    for limit, found in zip(limits, spans(p, m, method, costs, limits), strict=True):
        fitting = [makespan for peak, makespan in bases if peak <= limit]
        if found is None:
            assert not fitting
            continue
        peak, makespan = found
        assert peak <= limit + 1e-9
        assert makespan <= min(fitting, default=makespan) * (1 + 1e-9), limit
        assert makespan <= shortest * (1 + 1e-9), limit
        shortest = makespan


def jobs(ranks, microbatches):
    return st.tuples(
        st.integers(*ranks),
        st.integers(*microbatches),
        st.sampled_from(["none", "vocab-1", "vocab-2"]),
        st.tuples(*[st.sampled_from([0.6, 1.0, 1.0, 1.9])] * 3),
        st.sampled_from([0.0, 0.0, 0.1]),
    )


@settings(max_examples=2, deadline=None)
@given(jobs((2, 5), (1, 9)))
def test_random_jobs_get_no_more_memory_and_no_longer_schedules(job):
    assert_keeps_its_promises(job)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(jobs((2, 8), (1, 40)) | jobs((9, 32), (1, 40)))
@example((26, 39, "vocab-2", (0.6, 1.0, 0.6), 0.1))  # its sample takes less than all microbatches
def test_many_random_jobs_get_no_more_memory_and_no_longer_schedules(job):
    assert_keeps_its_promises(job)


def test_at_the_limit_of_v_min_uneven_passes_take_a_twentieth_less():
    other = simulate(generate("v-min", 8, 24, vocab="vocab-2", costs=UNEVEN), UNEVEN)
    limit = max(other.peak_activation)
    found = generate("v-flex", 8, 24, vocab="vocab-2", costs=UNEVEN, activation_limit=limit)
    assert simulate(found, UNEVEN).makespan <= 0.95 * other.makespan


def test_without_a_limit_it_is_zb_v():
    plain, limited = generate("v-flex", 4, 8), generate("v-flex", 4, 8, activation_limit=100)
    assert plain.ranks == generate("zb-v", 4, 8).ranks
    assert simulate(limited).makespan <= simulate(plain).makespan


def test_the_shape_is_written_and_makes_the_same_schedule_without_a_search(monkeypatch):
    request = ScheduleRequest.of(FAMILIES["v-flex"], 4, 8, method=VocabMethod.VOCAB_2, costs=UNEVEN)
    family = fitted(request, 3)
    found = generate("v-flex", 4, 8, vocab="vocab-2", costs=UNEVEN, activation_limit=3)
    assert found.shape == family.shape != ""
    document = json.loads(to_json(found))
    assert (document["schedule"], document["shape"]) == ("v-flex", family.shape)
    assert from_json(json.dumps(document)) == found
    monkeypatch.setattr(module, "_Search", None)
    again = shaped(FAMILIES["v-flex"], document["shape"], 6)
    request = ScheduleRequest.of(again, 4, 8, method=VocabMethod.VOCAB_2, costs=UNEVEN)
    assert request.schedule() == found
    evaluated = ScheduleRequest.of(again, 4, 8, method=VocabMethod.VOCAB_2, costs=UNEVEN, forward_only=True).schedule()
    assert evaluated.ranks == evaluation(found, UNEVEN).ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["v-flex", "--activation-limit", "1"],
            "--activation-limit 1 is too small for a v-flex schedule of 8 ranks, 12 ",
        ),
        (["v-flex", "--activation-limit", "5GiB"], "'5GiB' is not a positive number of microbatches"),
        (["v-half", "--activation-limit", "4"], "--activation-limit cannot be used with schedule v-half"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, words):
    result = CliRunner().invoke(app, ["schedule", *arguments, "-p", "8", "-m", "12"])
    assert result.exit_code != 0 and words in str(result.exception or result.output)


def test_the_least_limit_that_is_named_is_reached():
    with pytest.raises(UserError) as refused:
        generate("v-flex", 8, 12, vocab="vocab-1", activation_limit=1)
    least = float(str(refused.value).rsplit(" ", 1)[1])
    timeline = validate(generate("v-flex", 8, 12, vocab="vocab-1", activation_limit=least))
    assert max(timeline.peak_activation) <= least
