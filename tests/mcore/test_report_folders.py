"""Test that a run does not mix its rank reports or traces with those of a run on more pipeline ranks."""

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore.start.preflight import check_job
from tests.harness.training import tiny_model


@pytest.mark.parametrize("option", ["rank_report", "pipeline_trace"])
def test_a_folder_with_files_of_more_ranks_is_refused_and_that_of_the_same_job_is_not(tmp_path, option):
    words = ["--cpu", *tiny_model(pipeline_model_parallel_size=2, **{option: str(tmp_path)})]
    for rank in range(2):
        (tmp_path / f"rank_{rank}.json").touch()
    check_job(words, 2)
    (tmp_path / "rank_2.json").touch()
    with pytest.raises(UserError, match=r"of a run with more pipeline ranks, which would mix .*: use another f"):
        check_job(words, 2)
