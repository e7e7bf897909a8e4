"""Trains and loads byte-level BPE tokenizers in the directory layout that Megatron's HuggingFaceTokenizer loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vp.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
# The smallest vocabulary consists of 256 byte tokens, two special tokens and one merge.
SMALLEST_VOCABULARY = 256 + 2 + 1
# The vocabulary is limited because the trainer allocates memory for all of it before it reads the first text.
LARGEST_VOCABULARY = 1 << 22


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on `texts`, with exactly `vocab_size` tokens including the two special tokens.

    Any text can be encoded, because every byte is a token. The same texts always yield the same tokenizer. Raises
    UserError if `vocab_size` is too small, too large, or larger than the number of tokens that the texts yield.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"a vocabulary of {vocab_size} tokens is too {'small' if vocab_size < SMALLEST_VOCABULARY else 'large'}: "
            f"ask for {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY} tokens"
        )
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
    if learned < vocab_size:
        raise UserError(
            f"the text yields only {learned} different tokens, fewer than the requested vocabulary of {vocab_size}; "
            f"use --vocab-size {learned} or less, or provide more text"
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

    Raises UserError if the directory, one of its files or the end-of-text token is missing or cannot be read.
    """
    from tokenizers import Tokenizer

    directory = Path(directory)
    check_tokenizer(directory)
    if not (directory / "tokenizer.json").is_file():
        raise UserError(f"{directory} contains no tokenizer.json, the only tokenizer format that this command reads")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = _config(directory).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    end_id = tokenizer.token_to_id(end) if isinstance(end, str) else None
    if end_id is None:
        raise UserError(
            f"{directory}/tokenizer_config.json does not name a token of the vocabulary as eos_token: set eos_token "
            "to the token that ends each document"
        )
    return tokenizer, end_id


def check_tokenizer(directory: str | os.PathLike[str]) -> None:
    """Check, without loading torch or transformers, that a Hugging Face tokenizer exists and is complete.

    `directory` may also be the name of a model in the local Hugging Face cache. Raises UserError if the check fails.
    """
    path = Path(directory)
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path} is a file; pass the directory that contains tokenizer.json")
        if _cached(str(directory)):
            return
        raise UserError(
            f"there is no tokenizer directory {path} (and no model of that name in the Hugging Face cache); "
            "create one with 'megatron-vp data'"
        )
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise UserError(f"{path} contains no tokenizer (no tokenizer.json); create one with 'megatron-vp data'")
    if not any((path / name).is_file() for name in ("tokenizer_config.json", "config.json")):
        raise UserError(f"{path} contains no tokenizer_config.json, which names the tokenizer class to load")
    _config(path)
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # The library raises a bare Exception for any defect in the file.
            raise UserError(f"{path}/tokenizer.json cannot be read: {error}; replace the file") from error


def _config(directory: Path) -> dict:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}; correct or replace the file") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} does not contain a JSON object; correct or replace the file")
    return config


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except HFValidationError:
        return False
