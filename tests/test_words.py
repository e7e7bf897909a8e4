"""Test for habits of writing that readers stumble over: none in pages, ever fewer in the package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_COUNTED = (
    "barrier|bytes|cell|chunks?|copy|device|entry|file|forwards?|GiB|GPUs?|instruction|iteration|lane|layers?|lines?|"
    "logits?|message|microbatch|ms|number|once|operations?|pass|passes|process|processes|rows?|s|seconds?|slots?|stages?|"
    "tensor|times|tokens?|twice|weight"
)
_EACH = (
    "candidate|chunk|device|direction|GPU|iteration|layer|line|logit|microbatch|node|parameter|rank|second|slot|stage|"
    "step|token"
)
HABITS = {
    '"is no X" for "is not an X"': r"(?<!there )(?<!There )\b(?:is|are) no\b(?! longer| more| less)",
    '"beside" for "next to"': r"\bbeside\b",
    '"a rank" for "per rank"': rf"\b(?:{_COUNTED}) an? (?:{_EACH})\b(?! (?:has|holds|comes|of|time)\b)(?!\'s)",
    "words that nobody says": r"\bso does\b|\bplainly\b|\breckon|\bsomebody\b|\bfor ever\b",
    "nobody and whoever": r"\b[Nn]obody\b|\b[Ww]hoever\b",
    "documents that are not here": r"\bthe design\b|\bearlier version\b|\brung \d",
}

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PACKAGE = [*sorted(ROOT.glob("megatron_vp/**/*.py")), ROOT / "pretrain_gpt_vp.py"]


def lines_with(habit, paths):
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(HABITS[habit], line)
    ]


@pytest.mark.parametrize("habit", HABITS)
def test_pages_and_package_are_free_of_it(habit):
    assert lines_with(habit, [*PAGES, *PACKAGE]) == []
