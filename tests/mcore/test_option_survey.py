"""Test Megatron's less common options: every number that a run logs equals plain Megatron's."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import pytest

from tests.harness.ranks import run_ranks
from tests.mcore.option_survey.data import make_data
from tests.mcore.option_survey.job import BOUND, covered
from tests.mcore.option_survey.jobs import JOBS
from tests.mcore.option_survey.run import PLAIN, differences, train

BY_NAME = {job.name: job for jobs in JOBS.values() for job in jobs}
RUNS = [
    pytest.param(job.name, way, marks=() if way in job.default else pytest.mark.slow, id=f"{group}-{job.name}-{way}")
    for group, jobs in JOBS.items()
    for job in jobs
    for way in job.ways
]


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    """Small datasets, and plain Megatron's runs, made once each: `data`; `plain(name)` gives runs and their folder."""
    data = tmp_path_factory.mktemp("data")
    make_data(data)

    @cache
    def plain(name):
        folder = tmp_path_factory.mktemp("plain")
        return train(BY_NAME[name], PLAIN, data, folder), folder

    return SimpleNamespace(data=data, plain=plain)


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_every_logged_number_equals_plain_megatrons(survey, tmp_path, name, way):
    job = BY_NAME[name]
    expected, folder = survey.plain(name)
    moved = job.starts_from_checkpoint(way)
    runs = train(job, way, survey.data, tmp_path, folder / "saved")
    for number, (found, plain) in enumerate(zip(runs, expected, strict=True)):
        assert found.lines
        assert not differences(job, found, plain, moved), f"run {number}"
        # Our passes send and receive beside each other, and no timer of Megatron's counts that.
        assert {name for name in plain.times - found.times if not re.search("send|recv", name)} == set()


def test_every_name_is_an_option_of_megatrons_and_of_one_job(capsys):
    jobs = list(BY_NAME.values())
    (options,) = run_ranks(1, megatron_options)
    assert covered(jobs) <= options
    assert len(jobs) == sum(map(len, JOBS.values()))
    for job in jobs:
        assert set(job.default) <= set(job.ways) and (job.bound == BOUND or job.why), job.name
    with capsys.disabled():
        print(
            f"\nthe option survey: {len(jobs)} jobs, {len(RUNS)} runs, {len(covered(jobs))} of {len(options)} options"
        )


def megatron_options(_rank, _world_size):
    """Names of the options of Megatron's parser, with underscores."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {name.lstrip("-").replace("-", "_") for action in parser._actions for name in action.option_strings}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "highest", "lowest"),
    [
        ("another rate", 5e-4, 5e-5),
        ("another rate, the checkpoint's kept", 1e-3, 1e-4),
    ],
)
def test_a_run_goes_on_with_the_rate_that_it_was_told_to_take(survey, name, highest, lowest):
    (_, resumed), _ = survey.plain(name)
    rates = resumed.scalars["learning-rate"]
    # Linear, in ten iterations.
    expected = {(step, 0): lowest + (1 - step / 10) * (highest - lowest) for step in (6, 7, 8)}
    assert rates == pytest.approx(expected)
