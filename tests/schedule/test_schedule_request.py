"""Test that a request is complete and checked however it was made, so that it can be the key of a cache."""

from dataclasses import replace

import pytest

from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    PassCosts,
    ScheduleRequest,
    VocabMethod,
    family,
    generate,
    to_json,
)

TWO = VocabMethod.VOCAB_2


def test_what_is_left_open_is_what_could_have_been_said():
    v_half, interlaced = FAMILIES["v-half"], FAMILIES["interlaced"]
    said = ScheduleRequest.of(
        v_half, 4, 6, method=TWO, chunks=2, costs=PassCosts(), vocab_ranks=(3, 1, 0, 2), forward_only=False
    )
    assert ScheduleRequest.of(v_half, 4, 6, method=TWO) == said and said.vocab_ranks == (0, 1, 2, 3)
    assert ScheduleRequest.of(interlaced, 4, 6).method is VocabMethod.INTERLACED
    assert ScheduleRequest.of(v_half, 4, 6).vocab_ranks == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"method": VocabMethod.INTERLACED},
            "interlaced cannot be used with schedule v-half, which supports none, vocab-1",
        ),
        ({"chunks": 3}, "v-half has 2 chunks per rank, got 3"),
        ({"microbatches": 0}, "0 microbatches are too few"),
        ({"pipeline_size": 1, "vocab_ranks": (0,)}, "size 1 is too small for v-half with vocab method vocab-2"),
        (
            {"vocab_ranks": (0, 4)},
            "vocabulary rows on ranks 0, 4 are not possible; give at least one of the ranks 0 to 3",
        ),
        ({"microbatches": 250_001}, "4 ranks x 250001 microbatches make more than 1,000,000 forward passes"),
    ],
)
def test_a_changed_request_is_checked_again(changes, words):
    with pytest.raises(UserError, match=words):
        replace(ScheduleRequest.of(FAMILIES["v-half"], 4, 6, method=TWO), **changes)


def test_a_file_that_was_written_again_is_another_request(tmp_path):
    path, requests = tmp_path / "mine.json", []
    for microbatches in (3, 4):
        path.write_text(to_json(generate("1f1b", 2, microbatches)))
        record = family(str(path))
        requests.append(ScheduleRequest.of(replace(record, placement=len), 2, 3))
    assert requests[0] != requests[1] and hash(requests[0]) == hash(requests[1])


def test_a_file_evaluates_any_number_of_microbatches_and_trains_its_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(to_json(generate("1f1b", 2, 3)))
    request = ScheduleRequest.of(family(str(path)), 2, 3)
    assert replace(request, microbatches=2).schedule().microbatches == 2
    assert replace(request, microbatches=7, forward_only=True).schedule().microbatches == 7
    with pytest.raises(UserError, match="has 2 ranks and 3 microbatches, but 2 and 7 are requested"):
        replace(request, microbatches=7)
