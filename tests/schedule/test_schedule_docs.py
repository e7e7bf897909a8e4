"""Test that the figures in the documentation are those of the code."""

import importlib.util
from pathlib import Path

from megatron_vp.schedule import from_csv
from megatron_vp.schedule.validate import validate

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("schedule_figures", ROOT / "scripts" / "schedule_figures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_shows_the_present_figures():
    script = load_script()
    page = script.FIGURES.read_text(encoding="utf-8").splitlines()
    for name, vocab in script.rows():
        (line,) = [line for line in page if line.startswith(f"| `{name}` | {vocab} |")]
        ranks = script.SIZES[0]
        assert line.split(" | ")[2] == script.cell(script.timeline(name, vocab, ranks)), (name, vocab)


def test_the_page_shows_what_a_limit_costs(monkeypatch):
    script = load_script()
    page = script.PAGE.read_text(encoding="utf-8").split("<!-- begin limit figures -->")[1]
    monkeypatch.setattr(script, "LIMITS", (5,))
    for line in script.limit_table().splitlines()[2:]:
        vocab, cell = line.strip("| ").split(" | ")
        (row,) = [each for each in page.splitlines() if each.startswith(f"| {vocab} |")]
        assert f"| {cell} |" in row


def test_the_page_shows_what_offloading_leaves():
    script = load_script()
    assert not script.write_block(script.PAGE, "offload figures", script.offload_table(), check=True)


def test_the_schedule_written_by_hand_runs():
    page = (ROOT / "docs" / "reference" / "schedule_formats.md").read_text(encoding="utf-8")
    assert validate(from_csv(page.split("```text\n")[1].split("```")[0])).makespan == 9
