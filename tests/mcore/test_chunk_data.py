"""Test the data of several chunks per rank: what a skipped iteration consumes."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_vp.mcore.training import forward_backward

SKIP = forward_backward._skipping


class Rerun:
    """Runs every step once, as Megatron's machine does where nothing is suspicious."""

    def __init__(self):
        self._runs = [True, False]

    def should_run_forward_backward(self, data_iterator):
        return self._runs.pop(0)


@pytest.mark.parametrize("chunks", [[iter(range(9)), None], [None, iter(range(9))], [iter(range(9)), iter(range(9))]])
def test_a_skipped_iteration_advances_the_data_of_every_chunk_by_its_microbatches(chunks):
    with (
        mock.patch.object(forward_backward, "get_rerun_state_machine", Rerun),
        mock.patch.object(forward_backward, "get_num_microbatches", lambda: 4),
    ):
        SKIP(None)(chunks)
    assert {next(each) for each in chunks if each is not None} == {4}


@pytest.mark.parametrize("data", [None, iter(range(9))])
def test_a_skipped_iteration_of_a_rank_with_one_chunk(data):
    with (
        mock.patch.object(forward_backward, "get_rerun_state_machine", Rerun),
        mock.patch.object(forward_backward, "get_num_microbatches", lambda: 4),
    ):
        SKIP(lambda data: None)(data)
    assert data is None or next(data) == 4
