"""Test that what the compatibility page says about tests is true."""

import ast
from pathlib import Path

import pytest

from tests.mcore.case_parts import COMBINATIONS, PROOFS, SURVEY
from tests.mcore.test_option_survey import covered

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("test", sorted(set(PROOFS.values())))
def test_every_named_test_exists(test):
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_jobs_have_names_of_their_own():
    for jobs in (COMBINATIONS, [job for group in SURVEY.values() for job in group]):
        assert len({job.name for job in jobs}) == len(jobs)


def test_the_evidence_page_says_how_much_the_option_survey_covers():
    jobs = [job for group in SURVEY.values() for job in group]
    expected = f"in {len(jobs)} jobs with {len(covered())} of Megatron's options"
    assert expected in (ROOT / "docs" / "evidence" / "index.md").read_text(), expected
