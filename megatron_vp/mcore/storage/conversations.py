"""Checks the JSON Lines files of conversations for --sft before a training run opens them."""

from __future__ import annotations

import json
import os

from megatron_vp.errors import UserError


def check_conversations(path: str | os.PathLike[str]) -> None:
    """Raise UserError unless the first line of a file is a conversation that Megatron's `SFTDataset` can read."""
    path = os.fspath(path)
    form = '{"messages": [{"role": "system", "content": "..."}, ...]}'
    try:
        with open(path, encoding="utf-8") as file:
            line = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        raise UserError(f"cannot read the conversations in {path}: {reason}; check --data-path") from error
    try:
        messages = json.loads(line)["messages"]
        complete = bool(messages) and all({"role", "content"} <= message.keys() for message in messages)
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise UserError(
            f"the first line of {path} is not a conversation, but --sft needs a conversation on every line: write each "
            f"line in the form {form}"
        )
