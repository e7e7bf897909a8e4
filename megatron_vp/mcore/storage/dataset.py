"""Writes Megatron's indexed datasets from documents, and refuses what would hang a training run."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import batched
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron_vp.data.tokenizer import (
    TOKENIZER_FILES,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from megatron_vp.errors import UserError, say
from megatron_vp.jobs.known_options import Arguments

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Documents = Iterable[tuple[str, str]]

MEGATRONS_SPLIT = "969,30,1"
"""Megatron's default split for --data-path, which gives the test set a thousandth of the documents."""

_LINE_EVERY = 2.0
"""Seconds between two lines of progress."""

_BATCH = 256
"""The number of documents that are encoded together, enough to keep all threads of the tokenizer busy."""


@dataclass(frozen=True)
class Prepared:
    """The files that `prepare` wrote."""

    dataset: Path  # The path of the .bin and .idx files, without the suffix.
    tokenizer: Path
    vocab_size: int
    documents: int
    tokens: int

    def flags(self) -> list[str]:
        """The flags for training on this dataset. Includes --split if Megatron's default split leaves a part empty."""
        split = split_for(self.documents)
        return [
            *("--data-path", str(self.dataset)),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(self.tokenizer)),
            *(("--split", split) if split else ()),
        ]


def split_for(documents: int) -> str | None:
    """Return a --split that gives validation and test a document each, or training all if there are too few; None if
    Megatron's default split certainly leaves no part empty.
    """
    if documents >= 1000:
        return None
    return f"{documents - 2},1,1" if documents > 2 else "1,0,0"


def prepare(
    documents: Documents,
    output: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Write documents to `corpus_text_document.{bin,idx}` in `output`, with an end-of-text token after each document.

    `documents` is a collection (not a generator) of (name, text) pairs. Give either `vocab_size`, to train a tokenizer
    with exactly this many tokens and save it in `corpus_tokenizer`, or `tokenizer`, the directory of an existing
    tokenizer. Files get their final names only when all are complete, and the index file gets its name last. An
    interrupted run therefore leaves no dataset that looks complete. Existing files are replaced only if `overwrite` is
    True. Raises UserError if there is no text, if a tokenizer of this vocabulary size cannot be trained on the text, or
    if a file already exists or cannot be written.
    """
    assert iter(documents) is not documents, "documents are read twice: give a collection, not a generator"
    if (vocab_size is None) == (tokenizer is None):
        raise UserError(
            "exactly one of --vocab-size and --tokenizer is needed: give --vocab-size to train a tokenizer, or "
            "--tokenizer to use an existing one"
        )
    output = Path(output)
    prefix = output / "corpus_text_document"
    directory = output / "corpus_tokenizer" if tokenizer is None else Path(tokenizer)
    index = Path(f"{prefix}.idx")
    written = [directory / file for file in TOKENIZER_FILES if tokenizer is None]
    written += [Path(f"{prefix}.bin"), index]
    taken = [] if overwrite else [path for path in written if os.path.lexists(path)]
    if taken:
        raise UserError(
            f"{taken[0]} already exists, and a run may be training on it: choose another --output, or "
            f"replace it with --overwrite"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output, prefix=".corpus-") as temporary:
            folder = Path(temporary)
            if vocab_size is not None:
                texts = _counted(documents, "training the tokenizer")
                save_tokenizer(train_tokenizer(texts, vocab_size), folder)
            model, end_id = load_tokenizer(folder if tokenizer is None else tokenizer)
            counts = _write(_counted(documents, "encoding"), model, end_id, folder / prefix.name)
            index.unlink(missing_ok=True)
            for path in written:
                path.parent.mkdir(exist_ok=True)
                (folder / path.name).replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write to {output}: {error.strerror}; choose another --output, or free some space if the "
            "disk is full"
        ) from error
    return Prepared(prefix, directory, model.get_vocab_size(), *counts)


def _counted(documents: Documents, stage: str) -> Iterator[str]:
    """Yield the non-empty texts of documents, and print from time to time how many characters have been read."""
    characters, said_at = 0, time.monotonic()
    for _, text in documents:
        if text:
            characters += len(text)
            if time.monotonic() > said_at + _LINE_EVERY:
                said_at = time.monotonic()
                say(f"{stage}: {characters / 1e6:.1f} million characters")
            yield text
    if not characters:
        raise UserError("the input contains no text")


def _write(texts: Iterable[str], tokenizer: Tokenizer, end_id: int, prefix: Path) -> tuple[int, int]:
    """Encode `texts` into `prefix`.{bin,idx}; return the number of documents and the number of tokens."""
    from megatron_vp.mcore.platform.flags import quiet_fallback_warnings
    from megatron_vp.mcore.platform.installed import here

    quiet_fallback_warnings()
    here()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    # If a document contains the text of a special token, encode it as ordinary text.
    tokenizer.encode_special_tokens = True
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.get_vocab_size()))
    with builder.data_file:
        for batch in batched(texts, _BATCH):
            for encoding in tokenizer.encode_batch_fast(list(batch), add_special_tokens=False):
                builder.add_document([*encoding.ids, end_id], [len(encoding.ids) + 1])
        builder.finalize(f"{prefix}.idx")
    return len(builder.sequence_lengths), sum(builder.sequence_lengths)


def _not_without_tokens(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def _get_num_tokens_per_epoch(self: Any) -> int:
        tokens = original(self)
        if not tokens:
            raise UserError(
                f"the {self.index_split.name} part of {self.dataset.path_prefix} has no tokens: change --split, or use "
                f"a dataset with more than {len(self.dataset)} documents"
            )
        return tokens

    return _get_num_tokens_per_epoch


def padded_vocabulary(args: Arguments) -> int | None:
    """Return the padded vocabulary size that Megatron will use for this job. If the tokenizer cannot be read here, for
    example because this machine is only used to plan the job, the size follows from --vocab-size. Returns None if the
    size is unknown.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer, vocab_size_with_padding

    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    asked = argparse.Namespace(**vars(args) | {"pad_vocab_size": False, "rank": 1})  # Only rank 0 prints messages.
    try:
        tokens = build_tokenizer(asked).vocab_size
    except Exception:  # Each tokenizer library raises its own kinds of errors, which the start repeats.
        tokens = args.vocab_size
    return None if tokens is None else vocab_size_with_padding(tokens, args, logging_enabled=False)
