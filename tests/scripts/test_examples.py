"""Test that pages show the real output of commands, and that the commands that they name exist."""

import importlib.util
import re
import shlex
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


def test_commands_and_options_that_do_not_exist_are_found():
    page = (
        "```bash\nx=1 megatron-vp schedule v-half \\\n    --no-such 1  # --nor-this\nmegatron-vp paper no-such\n```\n"
    )
    assert unknown(page) == ["schedule: {'--no-such'}", "paper no-such"]
    assert unknown("```bash\nmegatron-vp plan llama3_8b --nodes 4 --any-flag-of-megatron\n```\n") == []


def test_options_of_a_block_are_read_and_unknown_ones_refused():
    page = '<!-- run: head=1 keep="a b|c" most=2 slow -->\n```console\n$ one \\\n    two\nout\n```\n'
    (block,) = examples.blocks_of(page)
    assert block.example.words == "one \\\n    two" and block.example.keep == "a b|c" and block.example.slow
    assert examples.shown(block.example, "1\n2\na b\nc\nc\n") == "$ one \\\n    two\n1\n...\na b\nc\n...\n"
    for bad in ("kept=a", "slow=1", "most"):
        with pytest.raises(SystemExit, match="not an option"):
            list(examples.blocks_of(page.replace("slow", bad)))
    with pytest.raises(SystemExit, match="shows no command"):
        list(examples.blocks_of("```console\nout\n```\n"))


def test_digits_count_unless_they_are_said_to_differ():
    (exact,) = examples.blocks_of("```console\n$ a\n1.5 s\n```\n")
    (loose,) = examples.blocks_of("<!-- run: numbers -->\n```console\n$ a\n1.5 s\n```\n")
    assert not examples.alike(exact.example, "2 s", "1.5 s")
    assert examples.alike(loose.example, "a 12.2 b c | de ...", "a 1.5 b c | d ...")
    assert examples.alike(loose.example, " 12.25 s", "1.5 s") and not examples.alike(loose.example, "2 ms", "1.5 s")
