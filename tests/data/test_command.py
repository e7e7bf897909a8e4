"""Test `megatron-vp data` as a user calls it."""

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.data.tokenizer import load_tokenizer
from megatron_vp.errors import UserError


@pytest.fixture
def run(monkeypatch):
    return lambda *arguments: CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_prints_flags_that_train(run, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(30):
        (tmp_path / "in" / f"{number}.txt").write_text(f"Sample text {number}, with words and more words.\n" * 5)
    result = run(tmp_path / "in", "-o", tmp_path / "out", "--vocab-size", 280)
    assert result.exit_code == 0, result.output
    assert "30 documents" in result.stdout and "vocabulary size 280" in result.stdout
    flags = result.stdout.splitlines()[-1].split()
    assert flags[::2] == ["--data-path", "--tokenizer-type", "--tokenizer-model", "--split"]
    assert flags[3] == "HuggingFaceTokenizer"
    assert flags[7] == "28,1,1" and "too few documents (30) for Megatron's default --split" in result.stderr
    load_tokenizer(flags[5])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-o", "n" * 300, "--vocab-size", 280), "File name too long; choose another --output"),
        (("", "--vocab-size", 280), "an empty name is neither"),
    ],
)
def test_options_that_cannot_work_leave_nothing_behind(run, tmp_path, options, line):
    (tmp_path / "in.txt").write_text("text")
    result = run(tmp_path / "in.txt", "-o", tmp_path / "out", *options)
    assert isinstance(result.exception, UserError) and line in str(result.exception)
    assert not list(tmp_path.glob("out/*"))
