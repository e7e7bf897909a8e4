"""Test the pages: links lead somewhere, the glossary has every pass, and there are not too many words."""

import re
from pathlib import Path

import pytest
import yaml

from megatron_vp.schedule import PassKind

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SITE = sorted(DOCS.glob("**/*.md"))
MOST_WORDS = 20_000
"""Of docs/, written by hand."""


def anchors(page):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page):
    """Headings that the site's build makes are checked there."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        made = target.suffix != ".md" or (target.is_file() and "<!-- generated: " in target.read_text("utf-8"))
        there = target.exists() or target.resolve() == DOCS / "schedule.html"  # made with the site
        if not there or (anchor and not made and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def in_nav(entry):
    """The pages of a part of the site's navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in in_nav(each)]


def test_the_site_lists_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text("utf-8").replace("!!python/object/apply:pymdownx.slugs.slugify", "")
    assert sorted(in_nav(yaml.safe_load(text)["nav"])) == sorted(str(page.relative_to(DOCS)) for page in SITE)


def words_by_hand(page):
    """Of a page: without generated blocks, code, comments and the targets of links."""
    text = re.sub(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", "", page.read_text("utf-8"), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    return [word for word in text.split() if re.search(r"\w", word)]


def test_the_pages_are_not_too_long():
    words = {str(page.relative_to(DOCS)): len(words_by_hand(page)) for page in SITE}
    assert sum(words.values()) <= MOST_WORDS, words


def test_the_readme_fits_a_few_screens():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_glossary_has_every_pass_and_calls_no_pass_of_ours_planned():
    rows = re.findall(r"^\| `([A-Z]+)` \| (.*)$", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    implemented = {name for name, row in rows if "planned" not in row}
    assert implemented == {kind.value for kind in PassKind}
