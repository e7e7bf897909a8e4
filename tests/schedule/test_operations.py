"""Test that a new kind of operation, here a copy to disk, needs only one class to be validated, timed, lowered and
drawn.
"""

import json
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import pytest

from megatron_vp.errors import UserError
from megatron_vp.runtime.progress import Progress
from megatron_vp.schedule import (
    Channel,
    CollectiveKind,
    Pass,
    PassCosts,
    PassKind,
    Post,
    Run,
    StageCosts,
    Wait,
    generate,
    lower,
    programs_to_json,
    simulate,
    validate,
)
from megatron_vp.schedule.draw import to_perfetto, to_picture, to_text
from megatron_vp.schedule.transfers import Origin
from tests.schedule.program_player import HostWaits, stuck_ranks

MICROBATCHES = 4


class Dump(NamedTuple):
    """A chunk's activations on their way to disk."""

    rank: int
    chunk: int
    microbatch: int

    follows_step = property(lambda self: True)
    lane = property(lambda self: f"dumps of rank {self.rank}")
    cost = property(lambda self: "dump")
    per_chunk = property(lambda self: False)
    timing_key = property(lambda self: ("dump", self.rank))
    category = property(lambda self: "dump")
    track = property(lambda self: (self.rank, "dumps to disk"))

    def __str__(self):
        return f"dump:{self.microbatch}.{self.chunk}@{self.rank}"

    def members(self, vocab_members):
        return (self.rank,)

    def words(self, ranks):
        return f"the dump of microbatch {self.microbatch} from the device of rank {ranks[self.rank]}"


@pytest.fixture(params=["none", "vocab-1", "vocab-2"])
def schedule(request):
    """Every F of chunk 0 is dumped, and a pass D waits for that, before the next pass but one of its rank."""
    kind = PassKind.define(
        "D",
        "dumped",
        "#123456",
        mark="d",
        per_chunk=True,
        waits_for=("F",),
        through=lambda rank, step: Dump(rank, step.chunk, step.microbatch),
    )
    plain = generate("v-half", 2, MICROBATCHES, vocab=request.param)
    ranks = []
    for order in plain.ranks:
        found = list(order)
        for step in order:
            if step.kind is PassKind.F and step.chunk == 0:
                found.insert(min(found.index(step) + 3, len(found)), Pass(kind, step.microbatch))
        ranks.append(tuple(found))
    yield replace(plain, ranks=tuple(ranks))
    PassKind.remove("D")


COSTS = PassCosts(other={"dump": 0.75})


def dumps(timeline):
    return {operation: span for operation, span in timeline.operations.items() if isinstance(operation, Dump)}


def test_it_is_proven_and_timed(schedule):
    timeline = validate(schedule, COSTS)
    assert len(dumps(timeline)) == 2 * MICROBATCHES
    started = {
        (rank, step): start
        for rank, (order, spans) in enumerate(zip(schedule.ranks, timeline.spans, strict=True))
        for step, (start, _) in zip(order, spans, strict=True)
    }
    for copy, (start, end) in dumps(timeline).items():
        assert end - start == pytest.approx(0.75)
        assert start > started[copy.rank, Pass(PassKind.F, copy.microbatch)]
        assert end <= started[copy.rank, Pass(PassKind.D, copy.microbatch)]
    for rank in range(2):
        spans = sorted(span for copy, span in dumps(timeline).items() if copy.rank == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "one lane"
    free = dumps(simulate(schedule))
    assert all(start == end for start, end in free.values()), "costs that do not name it"


def test_its_cost_is_named_on_the_command_line(schedule):
    assert PassCosts.parse("dump=0.75") == COSTS
    with pytest.raises(UserError, match=r"'dumps=1' is not valid: write NAME=NUMBER, with NAME one of .*, dump"):
        PassCosts.parse("dumps=1")


def test_costs_by_place_know_it_by_its_key(schedule):
    work = dict.fromkeys("FBW", (1.0,) * schedule.placement.stages)
    shards = dict.fromkeys(schedule.vocab.passes, (0.1,) * 2)
    costs = StageCosts(**work, **shards, messages={("dump", 1): 0.5, (0, 1, Channel.ACTIVATION): 0.125})
    timeline = simulate(schedule, costs)
    took = {copy.rank: end - start for copy, (start, end) in dumps(timeline).items()}
    assert took == {0: 0, 1: pytest.approx(0.5)}


def test_its_rank_posts_it_behind_the_step_and_waits_before_the_pass(schedule):
    for program in lower(schedule, COSTS):
        places = {each: place for place, each in enumerate(program.instructions)}
        for microbatch in range(MICROBATCHES):
            copy = Dump(program.rank, 0, microbatch)
            made, used = (Run(Pass(kind, microbatch)) for kind in (PassKind.F, PassKind.D))
            between = program.instructions[places[made] + 1 : places[Post(copy)]]
            assert not any(isinstance(each, Run) for each in between), "nothing is computed in between"
            assert places[Post(copy)] < places[Wait(copy)] < places[used]
        posted = [each.operation for each in program.instructions if isinstance(each, Post)]
        assert len(posted) == len(set(posted))
        assert {each.rank for each in posted if isinstance(each, Dump)} == {program.rank}


@pytest.mark.parametrize("waits", HostWaits, ids=lambda waits: waits.name)
def test_programs_with_it_are_written_and_end(schedule, waits):
    text = programs_to_json(schedule, lower(schedule, COSTS))
    entry = {"operation": "dump:2.0@1", "members": [1], "lane": "dumps of rank 1"}
    written = json.loads(text)["programs"][1]
    assert {"do": "post", **entry} in written and {"do": "wait", **entry} in written
    assert not stuck_ranks(text, waits)


def test_it_is_drawn(schedule):
    timeline = simulate(schedule, COSTS)
    events = json.loads(to_perfetto(timeline))["traceEvents"]
    [track] = [event for event in events if event.get("args", {}).get("name") == "dumps to disk" and event["pid"] == 1]
    slices = [event for event in events if event["name"] == "dump:2.0@1"]
    assert [(each["pid"], each["tid"], each["cat"], each["dur"]) for each in slices] == [
        (1, track["tid"], "dump", pytest.approx(750))
    ]
    assert "d is D" in to_text(timeline) and "dumped" in to_picture(timeline, "svg").decode()


def test_a_rank_that_waits_for_it_says_so():
    progress = Progress((4, 5), 1)
    progress.at(Wait(Dump(1, 0, 3)))
    assert progress.sentence() == "rank 5 waited for the dump of microbatch 3 from the device of rank 5"


@pytest.mark.parametrize("enum", [Channel, CollectiveKind])
def test_no_kind_of_communication_is_made_without_its_words(enum):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):

        class Extended(StrEnum):
            __new__ = enum.__new_member__
            SILENT = "silent"

    assert all(channel.content for channel in Channel) and all(kind.origin in Origin for kind in CollectiveKind)
