"""Test that pages show the real output of commands, and that the commands that they name exist."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megatron_vp.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def load_script():
    spec = importlib.util.spec_from_file_location("examples", ROOT / "scripts" / "examples.py")
    script = sys.modules["examples"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


examples = load_script()
BLOCKS = [(page, block) for page in PAGES for block in examples.blocks_of(page.read_text(encoding="utf-8"))]
QUICK = [(page, block) for page, block in BLOCKS if not block.example.slow]
SLOW = sorted({page for page, block in BLOCKS if block.example.slow})


def require_same(block, folder):
    fresh = examples.shown(block.example, examples.run(block.example, folder))
    assert examples.alike(block.example, fresh, block.shown), fresh


@pytest.mark.parametrize(
    "page, block", QUICK, ids=[f"{page.stem}-{block.example.command.splitlines()[0][:60]}" for page, block in QUICK]
)
def test_pages_show_what_commands_print(tmp_path, page, block):
    """Where it does not: python scripts/examples.py PAGE."""
    examples.prepare(tmp_path, page.read_text(encoding="utf-8"))
    require_same(block, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=lambda page: page.stem)
def test_pages_show_what_long_commands_print(tmp_path, page):
    text = page.read_text(encoding="utf-8")
    examples.prepare(tmp_path, text)
    for block in examples.blocks_of(text):
        require_same(block, tmp_path)


def commands_of(text):
    """The words behind `megatron-vp` in a page's shell blocks; those of a training script are its own."""
    for fence in re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", fence).splitlines():
            found = re.match(r"(?:\$ )?(?:[^#\n]* )?(?:\S*/)?megatron-vp ([a-z].*)", line)
            if found:
                yield shlex.split(found[1], comments=True)


def unknown(text):
    """Commands and options of a page that do not exist."""
    found = []
    for words in commands_of(text):
        command, path = typer.main.get_command(app), []
        while words and isinstance(getattr(command, "commands", None), dict):
            path.append(words.pop(0))
            command = command.commands.get(path[-1])
        if command is None:
            found.append(" ".join(path))
            continue
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)} - {"--help"}
        if not command.context_settings.get("ignore_unknown_options") and given - known:
            found.append(f"{' '.join(path)}: {given - known}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_commands_and_options_that_exist(page):
    assert not unknown(page.read_text(encoding="utf-8"))


def test_every_command_has_an_example_of_what_it_prints():
    assert {path.stem for path in examples.FOLDER.iterdir()} == {name.replace(" ", "_") for name in examples.EXAMPLES}
    for name in examples.EXAMPLES:
        kept = examples.path_of(name).read_text(encoding="utf-8")
        assert kept.startswith("$ ") and "megatron-vp " in kept and kept.count("\n") > 1, name
    said = subprocess.run(
        [sys.executable, "-m", "megatron_vp", "paper", "jobs", "--help"], capture_output=True, text=True
    ).stdout
    assert all(f"  {line}\n" in said for line in examples.path_of("paper jobs").read_text("utf-8").splitlines())


SAME = ("plan", "simulate", "data", "flags", "sbatch", "tables")
"""Further commands whose example is the same on every machine."""


@pytest.mark.parametrize(
    "name", ["schedule", "paper jobs", *[pytest.param(name, marks=pytest.mark.slow) for name in SAME]]
)
def test_examples_in_the_help_show_what_the_commands_print(tmp_path, name):
    """Those whose output is the same everywhere."""
    examples.prepare(tmp_path)
    example = examples.EXAMPLES[name]
    assert examples.shown(example, examples.run(example, tmp_path)) == examples.path_of(name).read_text("utf-8")
