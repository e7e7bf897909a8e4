"""Reads documents from text files, JSON lines and directories."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_vp.errors import UserError


@dataclass(frozen=True)
class TextFiles:
    """Documents read from `files`; can be iterated over repeatedly. `.jsonl` files hold one JSON object per line.

    Iterating yields one (name, text) pair per document. The name is the file's path, with `:line` appended if the
    document is one line of the file. A text file is one document or, with `split_lines`, one document per line. In a
    JSON object, the text is the value of the key `json_key`. If each line is a document, empty lines are skipped.
    Raises UserError, naming file and line, for bytes that are not UTF-8 and lines without a text under the key.
    """

    files: tuple[Path, ...]
    json_key: str = "text"
    split_lines: bool = False

    @classmethod
    def find(
        cls, inputs: Sequence[str | os.PathLike[str]], json_key: str = "text", split_lines: bool = False
    ) -> TextFiles:
        """Collect the files that `inputs` names. A directory stands for all non-hidden files below it, sorted by path.

        Raises UserError for an input that names no regular file. A pipe is refused, because files are read twice.
        """
        files: list[Path] = []
        for name in inputs:
            path = Path(name or "an empty name")
            below = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
            found = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
            if not found:
                raise UserError(f"{path} is neither a regular file nor a folder with files: give text or .jsonl files")
            files += found
        return cls(tuple(files), json_key, split_lines)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for file in self.files:
            by_line = self.split_lines or file.suffix == ".jsonl"
            try:
                with file.open("rb") as stream:
                    for number, data in enumerate(stream if by_line else [stream.read()], 1):
                        where = f"{file}:{number}" if by_line else str(file)
                        text = data.decode("utf-8")
                        if by_line:
                            text = text.rstrip("\r\n")
                        if text.strip() or not by_line:
                            yield where, self._text_of(text, where) if file.suffix == ".jsonl" else text
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 text ({error}): convert the file to UTF-8") from error

    def _text_of(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
            text: str = record[self.json_key]
            text.encode()  # An unpaired surrogate is not valid text.
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where} has no text under the key '{self.json_key}' ({type(error).__name__}: {error}): correct the "
                f"line, which begins {line[:60]!r}, or name the right key with --json-key"
            ) from None
        return text
