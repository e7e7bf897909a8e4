"""The pages as a reader meets them: links lead somewhere, and the glossary has every pass."""

import re
from pathlib import Path

import pytest

from megatron_vp.schedule import FAMILIES, PassKind

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def anchors(page):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES if page.name != "README.md" and f"({page.relative_to(ROOT)})" not in readme]
    assert not missing


def test_the_glossary_has_every_pass_and_calls_no_pass_of_ours_planned():
    rows = re.findall(r"^\| `([A-Z]+)` \| (.*)$", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    implemented = {name for name, row in rows if "planned" not in row}
    assert implemented == {kind.value for kind in PassKind}


def test_the_readme_has_every_schedule():
    rows = re.findall(r"^\| `([a-z0-9][a-z0-9-]*)`", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert rows == list(FAMILIES)
