"""Small datasets for the option survey. Token ids are below 500; the largest one ends a document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 499
SEQUENCE = 32


def make_data(folder: Path) -> None:
    """Make the datasets a, b and c of different lengths, and the files that list them for options that read files."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(1)
    for name, sequences in (("a", 400), ("b", 16), ("c", 8)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32)
        left = sequences * SEQUENCE + 1
        while left > 0:
            length = min(int(random.integers(10, 90)), left)
            ids = [*random.integers(0, END_OF_DOCUMENT, length - 1), END_OF_DOCUMENT]
            builder.add_document(torch.tensor(ids, dtype=torch.int32), [length])
            left -= length
        builder.finalize(str(folder / f"{name}.idx"))
    (folder / "arguments").write_text(f"0.5 {folder}/a 0.5 {folder}/b\n")
    sets = {name: [str(folder / file)] for name, file in (("train", "a"), ("valid", "b"), ("test", "c"))}
    (folder / "sets.json").write_text(json.dumps(sets))
