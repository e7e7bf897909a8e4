"""Test that unsuitable data and vocabularies are refused with one line on every rank, before training starts."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from megatron_vp.mcore.storage.dataset import padded_vocabulary, prepare
from tests.harness import run_ranks_to_their_end, train
from tests.mcore.faults import errors, few_steps, train_with_fault

TEXT = "one two three four five six seven eight nine ten eleven twelve "


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """283 tokens of text and a tokenizer of 264."""
    return prepare([("text", TEXT * 6)], tmp_path_factory.mktemp("data"), vocab_size=264)


@pytest.fixture
def copy(prepared, tmp_path):
    """The prefix of a dataset to damage."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prepared.dataset}{suffix}", tmp_path / f"copy{suffix}")
    return tmp_path / "copy"


def _on(dataset, tokenizer, **changes):
    model = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer} if tokenizer else {}
    options = {"mock_data": None, "vocab_size": None, "data_path": dataset, "split": "1,0,0", **model, **changes}
    return few_steps(data_cache_path=Path(dataset).parent / "cache", **options)


def test_a_part_without_tokens_does_not_hang(prepared, copy):
    ends = run_ranks_to_their_end(2, train_with_fault, _on(copy, prepared.tokenizer, split="98,1,1"))
    assert ends[0][0] == 2 and [line for line in errors(ends[0][1]) if "part of" in line and "has no tokens" in line]


def test_data_made_with_a_larger_vocabulary_is_named_by_its_first_id_outside(copy):
    arguments = _on(copy, None, vocab_size=63)
    ends = run_ranks_to_their_end(2, train_with_fault, arguments)
    assert 2 in {status for status, _ in ends} <= {1, 2}
    lines = [line for _, output in ends for line in errors(output)]
    assert any("is outside the vocabulary of 64 tokens: use the tokenizer" in line for line in lines)
    assert len(lines) in (1, 2) and not any("Traceback" in output for _, output in ends), lines


@pytest.mark.slow
def test_data_shorter_than_the_run_starts_over_as_in_plain_megatron(prepared):
    """Five iterations read 640 tokens."""
    ours, plain = (
        train(2, _on(prepared.dataset, prepared.tokenizer, vocab_parallel=vocab_parallel))
        for vocab_parallel in (True, False)
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)


def test_without_the_tokenizer_the_size_follows_from_its_number_of_tokens():
    sizes = {"padded_vocab_size": None, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2}
    args = argparse.Namespace(tokenizer_type="SentencePieceTokenizer", tokenizer_model="gone", rank=1, **sizes)
    args.vocab_size = None
    assert padded_vocabulary(args) is None
    args.vocab_size = 1000
    assert padded_vocabulary(args) == 1024
