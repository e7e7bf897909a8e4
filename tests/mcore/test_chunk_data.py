"""Test the data of several chunks per rank: what a skipped iteration consumes, and how validation sets are counted."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore.training import chunk_data

SKIP, COUNT, EVALUATE = (patch.make for patch in chunk_data.PATCHES)


class Rerun:
    """Runs every step once, as Megatron's machine does where nothing is suspicious."""

    def __init__(self):
        self._runs = [True, False]

    def should_run_forward_backward(self, data_iterator):
        return self._runs.pop(0)


@pytest.mark.parametrize("chunks", [[iter(range(9)), None], [None, iter(range(9))], [iter(range(9)), iter(range(9))]])
def test_a_skipped_iteration_advances_the_data_of_every_chunk_by_its_microbatches(chunks):
    with (
        mock.patch.object(chunk_data, "get_rerun_state_machine", Rerun),
        mock.patch.object(chunk_data, "get_num_microbatches", lambda: 4),
    ):
        SKIP(None)(chunks)
    assert {next(each) for each in chunks if each is not None} == {4}


@pytest.mark.parametrize("data", [None, iter(range(9))])
def test_a_skipped_iteration_of_a_rank_with_one_chunk(data):
    with (
        mock.patch.object(chunk_data, "get_rerun_state_machine", Rerun),
        mock.patch.object(chunk_data, "get_num_microbatches", lambda: 4),
    ):
        SKIP(lambda data: None)(data)
    assert data is None or next(data) == 4


def _counted(lengths, names=None, eval_iters=7):
    """What the arguments say after each chunk's data is built: the iterations of each set, or None without data."""
    args = argparse.Namespace(eval_iters=eval_iters, validation_set_names=names)
    given = []

    def build(_provider):
        given.append(args.eval_iters)
        args.eval_iters = found.pop(0)

    found = list(lengths)
    with mock.patch.object(chunk_data, "current", lambda: SimpleNamespace(args=args)):
        patched = COUNT(build)
        for _ in lengths:
            patched(None)
    assert given == [eval_iters] * len(lengths)
    return args.eval_iters


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([[3, 2], [None, None]], [3, 2]),
        ([[None, None], [3, 2]], [3, 2]),
        ([[None, None], [None, None]], [0, 0]),
        ([[None, None]], [0, 0]),
        ([7, 7], 7),
    ],
)
def test_a_chunk_without_data_does_not_forget_how_long_validation_sets_are(lengths, expected):
    assert _counted(lengths) == expected


def test_names_for_other_validation_sets_are_an_error_before_training():
    with pytest.raises(UserError, match="gives 1 names for 2 validation sets"):
        _counted([[3, 2]], names=["one"])


@pytest.mark.parametrize(("several", "expected"), [(True, [["a", "c"], ["b", "d"]]), (False, [["a", "b"], ["c", "d"]])])
def test_the_data_of_chunks_is_handed_out_by_validation_set(several, expected):
    args = argparse.Namespace(multiple_validation_sets=several)
    with mock.patch.object(chunk_data, "current", lambda: SimpleNamespace(args=args)):
        evaluate = EVALUATE(lambda prefix, forward_step, data_iterator, model: data_iterator)
        assert evaluate("", None, [["a", "b"], ["c", "d"]], ["chunk", "chunk"]) == expected
