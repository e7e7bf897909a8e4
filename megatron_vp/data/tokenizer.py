"""Trains and loads byte-level BPE tokenizers in the directory layout that Megatron's HuggingFaceTokenizer loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vp.errors import UserError, printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on `texts`, with exactly `vocab_size` tokens including the two special tokens.

    Any text can be encoded, because every byte is a token. The same texts always yield the same tokenizer. Raises
    UserError if the texts yield another number of tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size()
    if learned != vocab_size:
        raise UserError(
            f"the text yields {learned} different tokens instead of the requested vocabulary of {vocab_size}: use "
            f"--vocab-size {learned}, or provide more text"
        )
    return tokenizer


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""The files that `save_tokenizer` writes into its directory."""


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        # Documents are cut into training sequences after tokenization, so the tokenizer itself accepts any length.
        "model_max_length": 10**30,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(directory: str | os.PathLike[str]) -> tuple[Tokenizer, int]:
    """Load a tokenizer from its directory; return it and the id of its end-of-text token.

    Raises UserError if one of TOKENIZER_FILES or the end-of-text token is missing or cannot be read.
    """
    from tokenizers import Tokenizer

    file, config = (Path(directory) / name for name in TOKENIZER_FILES)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        end = json.loads(config.read_bytes())["eos_token"]
        end_id = tokenizer.token_to_id(end["content"] if isinstance(end, dict) else end)
    except Exception as error:  # The library raises a bare Exception for any defect in the file.
        fault = "no eos_token" if isinstance(error, KeyError | TypeError) else printable(str(error))
        raise UserError(
            f"cannot read {file} and {config.name} ({fault}): give the directory of a tokenizer with these two files, "
            "or train one with --vocab-size"
        ) from error
    if end_id is None:
        raise UserError(
            f"{config} names an eos_token that is not in the vocabulary: set it to the token that ends each document"
        )
    return tokenizer, end_id
