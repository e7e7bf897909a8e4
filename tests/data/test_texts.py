"""Test reading documents from files: how files are divided into documents, and errors for files that are refused."""

import json
import os

import pytest

from megatron_vp.data.texts import TextFiles
from megatron_vp.errors import UserError


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(inputs, **options):
    return [text for _, text in TextFiles.find(inputs, **options)]


def test_each_file_is_a_document_and_text_is_untouched(tmp_path):
    file = write(tmp_path / "a.txt", "one\r\n\n  two ü\n")
    assert texts([file]) == ["one\r\n\n  two ü\n"]


def test_split_lines(tmp_path):
    file = write(tmp_path / "a.txt", "one\n\n  two\r\nthree")
    assert texts([file], split_lines=True) == ["one", "  two", "three"]


def test_directory_is_read_recursively_in_path_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", ".git/x", "a/.hidden"):
        write(tmp_path / name, name)
    assert texts([tmp_path]) == ["a/b/c.md", "a/z.txt", "b.txt"]


def test_json_lines(tmp_path):
    lines = [json.dumps({"text": "one\ntwo", "content": "x"}), "", json.dumps({"text": "three", "content": "y"})]
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert texts([file]) == ["one\ntwo", "three"]
    assert texts([file], json_key="content") == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", b"abc\x93d", ["a.txt", "0x93", "position 3", "UTF-8"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', ["a.jsonl:2", "0xff"]),
        ("a.jsonl", '{"text": "a"}\n{"body": "b", "id": 1}', ["a.jsonl:2", "'text'", '"body": "b"', "--json-key"]),
        ("a.jsonl", '{"text": 3}', ["a.jsonl:1", "'text'"]),
        ("a.jsonl", '{"text": "a\\ud83d"}', ["a.jsonl:1", "\\ud83d", "surrogates not allowed"]),
        ("a.jsonl", "[1]", ["a.jsonl:1", "list"]),
        ("a.jsonl", "\n{text", ["a.jsonl:2", "JSONDecodeError"]),
    ],
)
def test_bad_content_is_named(tmp_path, name, content, parts):
    with pytest.raises(UserError) as error:
        texts([write(tmp_path / name, content)])
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["nowhere.txt", "empty", "pipe"])
def test_an_input_without_a_regular_file_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")  # The input is read twice.
    with pytest.raises(UserError, match=f"{name} is neither a regular file nor a folder with files"):
        TextFiles.find([tmp_path / name])
