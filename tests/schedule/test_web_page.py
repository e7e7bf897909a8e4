"""Test the interactive page of a schedule: its data is the timeline's, and a real browser shows it correctly."""

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import PassCosts, generate, simulate
from megatron_vp.schedule.web_page import to_html
from tests.harness.browser import CHROMIUM, Browser

COSTS = PassCosts(comm=0.1, other={"copy": 0.6})
OFFLOADED = simulate(generate("po", 3, 5, vocab="vocab-2", chunks=3, costs=COSTS, offload_chunks=1), COSTS)
PLAIN = simulate(generate("1f1b", 3, 5, costs=COSTS), COSTS)


def data(html):
    return json.loads(html.split('<script type="application/json" id="page">')[1].split("</script>")[0])


def run(*arguments):
    return CliRunner().invoke(app, ["schedule", *map(str, arguments)])


@pytest.mark.parametrize("timeline", [OFFLOADED, PLAIN], ids=["offloaded", "plain"])
def test_the_page_has_every_pass_with_its_times_and_what_it_waits_for(timeline):
    (found,) = data(to_html([timeline]))["schedules"]
    nodes, number = found["nodes"], 0
    for rank, (order, spans) in enumerate(zip(timeline.schedule.ranks, timeline.spans, strict=True)):
        for place, (step, span) in enumerate(zip(order, spans, strict=True)):
            name, _, on, *times, before, turn = nodes[number]
            assert (name, on) == (str(step), rank) and times == pytest.approx(span, rel=1e-8)
            assert turn == (number - 1 if place else None)
            ready = max((nodes[each][4] for each in [*before, *([] if turn is None else [turn])]), default=0.0)
            assert ready == pytest.approx(span[0], rel=1e-8)
            number += 1
    assert number == found["passes"] and len(nodes) == number + len(timeline.operations)
    (forward,) = [node for node in nodes[:number] if node[0] == "F2" and node[2] == 1]
    assert [nodes[each][0] for each in forward[5]] == ["F of microbatch 2 from rank 0"]
    for rank in range(3):
        assert max(level for _, level in found["memory"][rank]) == timeline.peak_activation[rank]
    assert (found["host"] is None) == (timeline is PLAIN)


def test_a_page_needs_no_network_and_no_name_breaks_out_of_it():
    assert not re.search(r"https?:|src=|href=|url\(|import\(|fetch\(", to_html([PLAIN, OFFLOADED]))
    name = "</script><img src=x onerror=fail()>"
    html = to_html([replace(PLAIN, schedule=replace(PLAIN.schedule, name=name))])
    assert name not in html and html.count("</script>") == 2
    assert data(html)["schedules"][0]["title"].startswith(name)


def test_the_command_compares_with_a_name_or_a_file(tmp_path):
    run("v-half", "-p", 3, "-m", 4, "--vocab", "vocab-1", "-o", tmp_path / "other.json")
    for other in ("v-half:vocab-1", tmp_path / "other.json"):
        assert run("1f1b", "-p", 3, "-m", 4, "-o", tmp_path / "page.html", "--compare", other).exit_code == 0
        first, second = data((tmp_path / "page.html").read_text())["schedules"]
        assert first["title"] == "1f1b, vocabulary none: 3 ranks, 1 chunk per rank, 4 microbatches"
        assert second["title"] == "v-half, vocabulary vocab-1: 3 ranks, 2 chunks per rank, 4 microbatches"
    refused = run("1f1b", "-p", 3, "-m", 4, "--compare", "v-half")
    assert isinstance(refused.exception, UserError) and "add --format html" in str(refused.exception)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH")
def test_a_browser_shows_passes_and_tells_what_they_wait_for(tmp_path):
    (tmp_path / "page.html").write_text(to_html([OFFLOADED, PLAIN]))
    backward = next(step for step in OFFLOADED.schedule.ranks[1] if str(step) == "B2")
    start, end = OFFLOADED.spans[1][OFFLOADED.schedule.ranks[1].index(backward)]
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html")
        headings = browser.value("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
        assert [heading.split(",")[0] for heading in headings] == ["po", "1f1b"]
        assert "S output layer, first pass" in browser.value("document.getElementById('legend').innerText")
        place = (
            "(() => { const view = views[0], box = view.canvas.getBoundingClientRect(); "
            f"return [box.left + view.x({(start + end) / 2}), box.top + view.top(1) + 5]; }})()"
        )
        x, y = browser.value(place)

        browser.mouse("mouseMoved", x, y)
        said = browser.value("about.innerText").splitlines()
        assert said[0] == "B2 on rank 1: B backward, chunk 0"
        assert said[1] == f"{start:.6g} to {end:.6g} ({end - start:.6g})"
        assert "waits for B of microbatch 2 from rank 2, there at" in "\n".join(said)
        assert "waits for the activations of microbatch 2 (chunk 0) from the host to rank 1" in "\n".join(said)
        assert re.search(r"activations held: [\d.]+ microbatches, in host memory [\d.]+", said[-1])
        browser.mouse("mouseMoved", 2, 2)
        assert browser.value("about.style.display") == "none"

        browser.click(x, y)
        browser.press("ArrowLeft")
        order = OFFLOADED.schedule.ranks[1]
        assert browser.value("chosen.node.name") == str(order[order.index(backward) - 1])
        browser.press("Escape")
        assert browser.value("chosen.node") is None

        browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200, modifiers=2)
        window = browser.value("[shown.from, shown.until]")
        assert window[1] - window[0] < 0.5 * PLAIN.makespan and window[0] < start < window[1]
        browser.mouse("mousePressed", x, y, button="left", clickCount=1)
        browser.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
        browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
        assert browser.value("shown.from") > window[0]
        browser.press("0")
        assert browser.value("[shown.from, shown.until]") == [0, max(OFFLOADED.makespan, PLAIN.makespan)]
        assert browser.printed().startswith(b"%PDF")
        assert browser.errors == []
