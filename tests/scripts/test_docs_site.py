"""Test the built documentation site: no broken links, and nothing is loaded from other hosts."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[2]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [str(ROOT / "scripts" / "docs.sh"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_with_its_generated_parts(site):
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")]
    assert len(pages) > 20
    for page in pages:
        assert "<!-- generated: " not in (site / page).read_text(encoding="utf-8"), page
    refusals = (site / "reference" / "refusals.html").read_text(encoding="utf-8")
    assert "is not supported: " in refusals and 'id="megatron-vp-plan"' in (
        site / "reference" / "commands.html"
    ).read_text("utf-8")


def test_no_page_loads_anything_from_another_host(site):
    for page in site.rglob("*.html"):
        loads = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text("utf-8")
        )
        assert not loads, page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH")
def test_a_browser_without_a_network_shows_the_home_page_with_its_schedules(site, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(site / "index.html")
        assert browser.value("document.querySelector('h1').firstChild.textContent") == "megatron_vp"
        pictures = "[...document.querySelectorAll('article img')].every(each => each.complete && each.naturalWidth > 0)"
        assert browser.value(pictures) and browser.value("document.querySelectorAll('iframe').length") == 1
        assert browser.errors == []
