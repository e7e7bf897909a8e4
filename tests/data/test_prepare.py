"""Test the tokenizer and the dataset: Megatron reads back the original text, and damaged data is refused."""

import argparse
import errno
import itertools
import shutil
from pathlib import Path

import pytest

from megatron_vp.data.tokenizer import END_OF_TEXT, load_tokenizer
from megatron_vp.errors import UserError
from megatron_vp.mcore.storage.dataset import prepare, split_for

TEXTS = [
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
    "",
    f"The token {END_OF_TEXT} in a text ends no document.  Grüße, 世界!\n" * 3,
    *(f"The quick brown fox number {i} jumps over the lazy dog {i * i}.\r\n" for i in range(50)),
]
DOCUMENTS = [text for text in TEXTS if text]
NAMED = [(str(number), text) for number, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(NAMED, tmp_path_factory.mktemp("data"), vocab_size=320)


@pytest.fixture
def copy(prepared, tmp_path):
    """A copy of the dataset to damage: its prefix."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prepared.dataset}{suffix}", tmp_path / f"copy{suffix}")
    return tmp_path / "copy"


def megatron_args(*flags):
    from megatron.training.arguments import add_megatron_arguments

    args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags)
    args.rank = 0
    return args


def test_megatron_reads_the_text_back(prepared, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = megatron_args(*prepared.flags())
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, args.padded_vocab_size) == (320, 384)
    assert tokenizer.detokenize([tokenizer.eod]) == END_OF_TEXT
    assert tokenizer.pad not in (None, tokenizer.eod)

    dataset = IndexedDataset(str(prepared.dataset))
    assert len(dataset) == prepared.documents == len(DOCUMENTS)
    assert sum(len(ids) for ids in dataset) == prepared.tokens
    for ids, text in zip(dataset, DOCUMENTS, strict=True):
        assert ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1]
        assert tokenizer.detokenize(ids[:-1].tolist()) == text


def test_same_text_gives_the_same_files(prepared, tmp_path):
    again = prepare(NAMED, tmp_path, vocab_size=320)
    for file in ("corpus_text_document.bin", "corpus_text_document.idx", "corpus_tokenizer/tokenizer.json"):
        assert (prepared.dataset.parent / file).read_bytes() == (tmp_path / file).read_bytes()
    assert again.tokens == prepared.tokens


def test_interrupted_run_leaves_nothing(tmp_path):
    class Interrupted(list):
        readings = 0

        def __iter__(self):
            self.readings += 1
            yield from NAMED
            if self.readings == 2:  # while it encodes
                assert list(tmp_path.iterdir())
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupted(), tmp_path, vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_and_replaced_only_when_asked(prepared, tmp_path):
    folder = Path(shutil.copytree(prepared.dataset.parent, tmp_path / "data"))
    before = contents(folder)
    for options in ({"vocab_size": 300}, {"tokenizer": prepared.tokenizer}):
        with pytest.raises(
            UserError, match=r"corpus_(tokenizer/tokenizer\.json|text_document\.bin) already exists.*--overwrite"
        ):
            prepare(NAMED, folder, **options)
    assert contents(folder) == before
    prepare([("x", DOCUMENTS[0] * 9)], folder, vocab_size=280, overwrite=True)
    after = contents(folder)
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in after if "config" not in name)


def test_files_that_the_command_did_not_write_are_never_removed(prepared, tmp_path):
    folder = Path(shutil.copytree(prepared.dataset.parent, tmp_path / "data"))
    (folder / "corpus_tokenizer" / "MY_NOTES.md").write_text("precious")
    prepare(NAMED, folder, vocab_size=300, overwrite=True)
    assert contents(folder)["corpus_tokenizer/MY_NOTES.md"] == b"precious"


@pytest.mark.parametrize("failing", range(4))
def test_no_index_stands_where_the_new_files_cannot_be_placed(prepared, tmp_path, monkeypatch, failing):
    folder = Path(shutil.copytree(prepared.dataset.parent, tmp_path / "data"))
    replace, count = Path.replace, itertools.count()

    def sometimes(self, target):
        if next(count) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", sometimes)
    with pytest.raises(UserError, match="No space left"):
        prepare(NAMED, folder, vocab_size=300, overwrite=True)
    assert not (folder / "corpus_text_document.idx").exists() and not list(folder.glob(".*"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 100_000}, r"yields \d+ different tokens instead of the requested vocabulary of 100000"),
        ({}, "exactly one of --vocab-size and --tokenizer"),
        ({"vocab_size": 300, "tokenizer": "x"}, "exactly one of --vocab-size and --tokenizer"),
        ({"tokenizer": "no/such"}, "cannot read no/such/tokenizer.json"),
    ],
)
def test_what_cannot_be_prepared(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        prepare(NAMED, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("empty", [[], [("a", "")]])
def test_no_text(prepared, tmp_path, empty):
    for options in ({"vocab_size": 300}, {"tokenizer": prepared.tokenizer}):
        with pytest.raises(UserError, match="contains no text"):
            prepare(empty, tmp_path, **options)


def edit(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: shutil.rmtree(d), "No such file"),
        (lambda d: (d / "tokenizer.json").unlink(), "No such file"),
        (lambda d: (d / "tokenizer_config.json").unlink(), "No such file"),
        (lambda d: edit(d / "tokenizer.json", lambda b: b[:1000]), "EOF while parsing"),
        (lambda d: edit(d / "tokenizer_config.json", lambda b: b[:20]), "Expecting ':' delimiter|Unterminated string"),
        (lambda d: (d / "tokenizer_config.json").write_text("{}"), "no eos_token"),
    ],
)
def test_damaged_tokenizer(prepared, tmp_path, damage, message):
    directory = Path(shutil.copytree(prepared.tokenizer, tmp_path / "tokenizer"))
    load_tokenizer(directory)
    damage(directory)
    with pytest.raises(
        UserError, match=f"cannot read .*tokenizer.json and tokenizer_config.json .*({message})"
    ) as error:
        load_tokenizer(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("documents", "split"), [(1, "1,0,0"), (17, "15,1,1"), (52, "50,1,1"), (10_000, None)])
def test_a_split_gives_each_part_a_document_or_all_to_training(documents, split):
    assert split_for(documents) == split
