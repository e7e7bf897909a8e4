"""Test that what the compatibility page says about tests is true."""

import ast
from pathlib import Path

import pytest

from tests.mcore.cases import CASES
from tests.mcore.option_survey.job import covered
from tests.mcore.option_survey.jobs import JOBS
from tests.mcore.proofs import PROOFS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("test", sorted({proof.test for proof in PROOFS}))
def test_every_named_test_exists(test):
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_evidence_page_says_how_much_the_option_survey_covers():
    jobs = [job for group in JOBS.values() for job in group]
    expected = f"in {len(jobs)} jobs with {len(covered(jobs))} of Megatron's options"
    assert expected in (ROOT / "docs" / "evidence" / "index.md").read_text(), expected
