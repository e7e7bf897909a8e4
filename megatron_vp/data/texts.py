"""Reads documents from text files, JSON lines, directories, and the source files that every Python installation has."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_vp.errors import UserError

_NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class TextFiles:
    """Documents read from `files`; can be iterated over repeatedly. `.jsonl` files hold one JSON object per line.

    Iterating yields one (name, text) pair per document. The name is the file's path, with `:line` appended if the
    document is one line of the file. A text file is one document or, with `split_lines`, one document per line. In a
    JSON object, the text is the value of the key `json_key`. If each line is a document, empty lines are skipped.
    Raises UserError, naming file and line, for bytes that are not UTF-8, lines that are not JSON, objects without the
    key, and texts with an unpaired surrogate.
    """

    files: tuple[Path, ...]
    json_key: str = "text"
    split_lines: bool = False

    @classmethod
    def find(
        cls, inputs: Sequence[str | os.PathLike[str]], json_key: str = "text", split_lines: bool = False
    ) -> TextFiles:
        """Collect the files that `inputs` names. A directory stands for all non-hidden files below it, sorted by path.

        Raises UserError for an empty name, an input that does not exist, a pipe, and a directory without files.
        """
        if not all(map(os.fspath, inputs)):
            raise UserError(
                "an input path is empty, perhaps because a shell variable is unset: pass text or .jsonl files"
            )
        files: list[Path] = []
        for path in map(Path, inputs):
            if path.is_dir():
                below = sorted(
                    file
                    for file in path.rglob("*")
                    if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
                )
                if not below:
                    raise UserError(f"the directory {path} contains no files; pass text or .jsonl files")
                files += below
            elif path.is_file():
                files.append(path)
            elif path.exists():
                raise UserError(f"{path} is a pipe or a device, which cannot be read twice: pass a regular file")
            else:
                raise UserError(f"there is no file or directory {path}")
        return cls(tuple(files), json_key, split_lines)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for file in self.files:
            by_line = self.split_lines or file.suffix == ".jsonl"
            try:
                with file.open("rb") as stream:
                    for number, data in enumerate(stream if by_line else [stream.read()], 1):
                        where = f"{file}:{number}" if by_line else str(file)
                        text = _decode(data, where)
                        if by_line:
                            text = text.rstrip("\r\n")
                        if text.strip() or not by_line:
                            yield where, self._text_of(text, where) if file.suffix == ".jsonl" else text
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}") from error

    def _text_of(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not a JSON object ({error}); fix the line") from error
        text = record.get(self.json_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise UserError(
                f"{where}: no text under the key '{self.json_key}' (found: {keys}); name the right key with --json-key"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise UserError(
                f"{where}: \\u{ord(half):04x} is an unpaired surrogate, which is not valid text; fix the line"
            ) from None
        return text


def standard_library_texts() -> list[tuple[str, str]]:
    """Return the running Python's standard library as (relative path, text) pairs: about 11 million characters that
    need no download. Tests, installed packages and the few files that are not UTF-8 are left out.
    """
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _NO_SOURCES.isdisjoint(name.parts):
            with suppress(UnicodeDecodeError, OSError):
                found.append((name.as_posix(), path.read_text(encoding="utf-8")))
    return found


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise UserError(
            f"{where}: byte 0x{byte:02x} at offset {error.start} is not UTF-8; convert the file to UTF-8"
        ) from error
