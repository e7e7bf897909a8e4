"""`megatron-vp data`: turn text into a tokenizer and a Megatron dataset."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.errors import say


def data(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT", show_default=False, help="Text files, .jsonl files, or folders with such files."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to; created if needed.")],
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=259,  # 256 bytes, two special tokens and one merge
            max=1 << 22,  # The trainer allocates memory for all of it before it reads the first text.
            help="Train a byte-level BPE tokenizer with a vocabulary of this size.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Use the tokenizer in this folder instead of training one.")
    ] = None,
    json_key: Annotated[
        str, typer.Option("--json-key", help="Key that holds the text in each JSON object of .jsonl files.")
    ] = "text",
    split_lines: Annotated[
        bool, typer.Option("--split-lines", help="Make every line of a text file a separate document.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing results in the output folder.")
    ] = False,
) -> None:
    """Turn text into a tokenizer and a dataset for Megatron.

    The command trains a tokenizer on the text, or uses an existing one. Each file, line or JSON object becomes a
    document that ends with the end-of-text token. At the end the command prints the flags for training on the dataset.
    """
    from megatron_vp.data.texts import TextFiles
    from megatron_vp.mcore.storage.dataset import MEGATRONS_SPLIT, prepare

    texts = TextFiles.find(inputs, json_key, split_lines)
    prepared = prepare(texts, output, vocab_size=vocab_size, tokenizer=tokenizer, overwrite=overwrite)
    flags = prepared.flags()
    if "--split" in flags:
        say(
            f"too few documents ({prepared.documents}) for Megatron's default --split {MEGATRONS_SPLIT}, which "
            "may leave the training, validation or test set empty: train with the --split below"
        )
    documents = f"{prepared.documents} document{'s' * (prepared.documents != 1)}"
    counts = f"{documents}, {prepared.tokens} tokens, vocabulary size {prepared.vocab_size}"
    typer.echo(f"{counts}. Train on this dataset with:")
    typer.echo("  " + shlex.join(flags))
