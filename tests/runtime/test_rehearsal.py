"""Test that a rehearsal uses everything that an iteration uses, and leaves weights and gradients unchanged."""

from __future__ import annotations

import itertools
from functools import partialmethod
from unittest import mock

import pytest

from megatron_vp.runtime import communicator
from megatron_vp.runtime.links import Links
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.store import Store
from megatron_vp.vocab.embedding import EmbeddingLayer
from tests.harness.ranks import run_ranks
from tests.runtime.toy import run_pipeline

STEPS = [(4, True), (2, False), (3, True)]


def used(rank: int, world: int, schedule: str, method: str) -> dict[str, object]:
    """What the rehearsals of one rank used, and the results of the iterations after them."""
    found: dict[str, object] = {"sent": set(), "received": set(), "messages": set(), "rows": set()}
    found |= {"iterations": [], "remembered": [], "checks": []}
    rehearsing = []

    def watched(owner, name, note):
        original = getattr(owner, name)

        def call(self, *arguments, **named):
            if rehearsing:
                note(self, *arguments, **named)
            return original(self, *arguments, **named)

        return mock.patch.object(owner, name, call)

    def exchanged(self, received, sent, incoming, outgoing):
        found["received"] |= {peer for peer, count in enumerate(incoming) if count}
        found["sent"] |= {peer for peer, count in enumerate(outgoing) if count}

    def rehearse(self, *arguments, original=Pipeline.rehearse, **named):
        rehearsing.append(True)
        before = self.progress.iteration
        original(self, *arguments, **named)
        rehearsing.clear()
        found["iterations"].append(self.progress.iteration - before)
        found["remembered"].append(self.has_rehearsed(arguments[3], named["gradients"]))

    def check(self, original, name, *arguments):
        found["checks"].append(name)
        original(self, *arguments)

    checks = [
        mock.patch.object(Store, name, partialmethod(check, getattr(Store, name), name))
        for name in ("assert_empty", "assert_peaks")
    ]
    with (
        checks[0],
        checks[1],
        mock.patch.object(Pipeline, "rehearse", rehearse),
        watched(communicator.NativeCommunicator, "exchange", exchanged),
        watched(Links, "send", lambda self, message, tensor: found["messages"].add((message.channel, tensor.shape))),
        watched(EmbeddingLayer, "backward_pass", lambda self, exchange, rows: found["rows"].add(len(rows))),
    ):
        return found | {"results": run_pipeline(rank, world, schedule, method, STEPS, False, rehearses=True)}


@pytest.fixture(scope="module", params=[("1f1b", "vocab-2"), ("zb-h1", "vocab-1")], ids=lambda each: "-".join(each))
def ranks(request):
    return request.param, run_ranks(3, used, *request.param, timeout=90)


def test_iterations_after_a_rehearsal_have_the_same_bits(ranks):
    job, found = ranks
    plain = run_ranks(3, run_pipeline, *job, STEPS, False, timeout=90)
    for rank in range(3):
        for (losses, gradients, *others), expected in zip(found[rank]["results"], plain[rank], strict=True):
            assert losses == expected[0] and others == list(expected[2:])
            for name, gradient in gradients.items():
                assert gradient is expected[1][name] is None or gradient.equal(expected[1][name]), (rank, name)


def test_every_pair_that_can_have_rows_exchanges_some_both_ways(ranks):
    _, found = ranks
    assert found[0]["received"] == found[0]["sent"] == {0, 1, 2}  # words from all, gradients to all
    assert all(found[rank]["received"] == found[rank]["sent"] == {0} for rank in (1, 2))


def test_kernels_meet_many_rows_and_few(ranks):
    _, found = ranks
    for rank in range(3):
        assert min(found[rank]["rows"]) == 1 and max(found[rank]["rows"]) >= 3, found[rank]["rows"]


def test_every_edge_carries_a_message_of_the_real_size(ranks):
    _, found = ranks
    expected = [{"activation"}, {"activation", "gradient"}, {"gradient"}]
    for rank, channels in enumerate(expected):
        assert found[rank]["messages"] == {(channel, (5, 2, 6)) for channel in channels}


def test_rehearsals_are_not_counted_as_iterations(ranks):
    _, found = ranks
    assert found[0]["iterations"] == [0, 0] and found[0]["remembered"] == [True, True]


def test_every_iteration_ends_with_an_empty_store_and_if_it_trains_with_the_promised_peaks(ranks):
    _, found = ranks
    trains = [gradients for _, gradients in STEPS]
    checks = [["assert_empty", *["assert_peaks"] * each] for each in (True, trains[0], False, *trains[1:])]
    assert all(each["checks"] == list(itertools.chain(*checks)) for each in found)
