"""Test packed sequences of equal length: every schedule against plain Megatron, with attention within each document.

The document boundaries change with the microbatch. Each case is one line.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_vp.errors import UserError
from megatron_vp.mcore.training.capture import check_packed
from megatron_vp.runtime.buffers import Shapes
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, comparable_model, train_case
from tests.mcore.case_parts import (
    ALL_TO_ALL,
    BOTH,
    DEEPSEEK,
    FP32,
    FULL_RECOMPUTE,
    HYBRID,
    LLAMA,
    MOE,
    SEQUENCE,
    TENSOR,
    TIED,
    way_options,
)
from tests.mcore.comparison import assert_equal

slow = pytest.mark.slow
ONE_SEQUENCE = {"micro_batch_size": 1, "global_batch_size": 4}
AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
TWO_AHEAD = {**AHEAD, "mtp_num_layers": 2}

DEEPSEEK_SLOWLY = {**DEEPSEEK, "lr": 1e-6}
"""Adam makes whole steps of the rounding of small gradients: two plain runs on one and two ranks drift by 1e-6."""

# Ranks, p, schedule/algorithm, options of both runs.
DEFAULT = [(2, 2, "v-half/vocab-2", {**LLAMA, **TWO_AHEAD, **MOE})]
CASES = [
    (3, 3, "zb-v/none", {"num_layers": 6, **ONE_SEQUENCE}),
    (4, 4, "v-min/vocab-1", {"num_layers": 8, **TIED}),
    (2, 2, "zb-h1/none", {**LLAMA, **FULL_RECOMPUTE}),
    (2, 2, "interleaved/vocab-1", {**TWO_AHEAD, **TIED, "eod_mask_loss": True, "calculate_per_token_loss": True}),
    (2, 2, "v-half/vocab-2", {**DEEPSEEK_SLOWLY, **AHEAD}),
    (4, 2, "1f1b/vocab-2", {**LLAMA, **SEQUENCE, **AHEAD}),
    (4, 2, "v-half/vocab-2", {**ALL_TO_ALL, **BOTH, **AHEAD}),
    (2, 2, "v-half/vocab-2", {**HYBRID, "hybrid_layer_pattern": "*-*-"}),
]


def packed_case(rank: int, world_size: int, arguments: list[str], **options: bool) -> Run | None:
    """`train_case` on documents of 1 to 47 tokens."""
    with mock.patch("megatron.core.datasets.gpt_dataset.MockGPTLowLevelDataset.max_sequence_length", 48):
        return train_case(rank, world_size, arguments, **options)


def _options(**changes: object) -> dict[str, object]:
    return {"dataloader_inter_document_masking": True, "core_attention": "sdpa"} | changes


def _train(ranks: int, same_weights: bool = True, **options: object) -> Run:
    return _merge(run_ranks(ranks, packed_case, comparable_model(**options), same_weights=same_weights, timeout=240))


@cache
def _plain(ranks: int, options: str) -> Run:
    return _train(ranks, **json.loads(options))


@pytest.mark.parametrize(
    ("ranks", "size", "method", "options"), [*DEFAULT, *(pytest.param(*case, marks=slow) for case in CASES)]
)
def test_every_step_equals_plain_megatron(ranks, size, method, options):
    options = _options(**options)
    assert_equal(
        _train(ranks, **options, **way_options(method, size)), _plain(ranks // size, json.dumps(options)), FP32
    )


@slow
def test_documents_change_what_a_model_learns():
    """Else the cases above would be those of other tests."""
    packed, whole = (_plain(1, json.dumps(_options(dataloader_inter_document_masking=on))) for on in (True, False))
    assert abs(packed.losses[0] - whole.losses[0]) > 1e-4


@slow
def test_a_fresh_run_starts_from_what_plain_megatron_draws():
    """With a micro batch of one: Megatron's own pipeline takes no other."""
    options = _options(**AHEAD, **ONE_SEQUENCE, num_layers=6)
    plain = _train(3, same_weights=False, **options, pipeline_model_parallel_size=3)
    assert_equal(_train(3, same_weights=False, **options, **way_options("zb-v/vocab-1", 3)), plain, FP32)


@slow
def test_training_goes_on_from_checkpoints_of_other_sizes_and_of_plain_megatron(tmp_path):
    options = _options(**{**LLAMA, **AHEAD}, num_layers=12, eval_iters=0)
    ways = [
        (2, way_options("v-half/vocab-2", 2)),
        (1, {}),
        (3, way_options("zb-h1/vocab-2", 3)),
        (2, way_options("v-half/vocab-2", 2)),
    ]
    whole = _train(2, **options, train_iters=8, **ways[0][1])
    losses, norms = [], []
    for part, (ranks, way) in enumerate(ways):
        folders = {"load": tmp_path / str(part - 1) if part else None, "save": tmp_path / str(part)}
        until = {"save_interval": 1000, "train_iters": 2 * part + 2, "override_opt_param_scheduler": True}
        run = _train(ranks, not part, **options, **way, **folders, **until)
        losses += run.losses
        norms += run.grad_norms
    assert losses == pytest.approx(whole.losses, rel=FP32, abs=0)
    assert norms == pytest.approx(whole.grad_norms, rel=FP32, abs=0)


def _partitioned(ends: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Stands for Transformer Engine's `thd_get_partitioned_indices`: of each document the pieces of one rank."""
    documents = torch.arange(tokens).split((ends[1:] - ends[:-1]).tolist())
    pieces = [document.chunk(2 * ranks) for document in documents]
    return torch.cat([each[place] for each in pieces for place in (rank, 2 * ranks - 1 - rank)])


def conversations_case(rank: int, world_size: int, arguments: list[str]) -> Run | None:
    """`train_case` with a stand-in for what reads JSON lines where it is missing, and for Transformer Engine's cut."""
    with mock.patch.dict(sys.modules, {} if find_spec("datasets") else {"datasets": _reads_json_lines()}):
        from megatron.core import utils

        with mock.patch.object(utils, "tex", SimpleNamespace(thd_get_partitioned_indices=_partitioned), create=True):
            return train_case(rank, world_size, arguments)


def _reads_json_lines() -> ModuleType:
    def load_dataset(_form: str, data_files: str, split: str) -> list[dict]:
        assert split == "all"
        return [json.loads(line) for line in Path(data_files).read_text().splitlines()]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    return module


WORDS = [
    "we",
    "pack",
    "short",
    "talks",
    "end",
    "to",
    "each",
    "one",
    "is",
    "read",
    "by",
    "itself",
    "from",
    "first",
    "word",
]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Options of a job on 60 lines of one to five conversations, made of few words so that losses are compared well."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("conversations")
    special = ["<unk>", "<eos>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"]
    names = {word: place for place, word in enumerate([*special, "System", "User", "Assistant", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(special)
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    draw = random.Random(3)

    def said(role: str, longest: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))}

    lines = [
        {
            "messages": [
                said(*turn)
                for _ in range(draw.randint(1, 5))
                for turn in (("system", 4), ("user", 9), ("assistant", 30))
            ]
        }
        for _ in range(60)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        **{"sft": True, "core_attention": "sdpa", "no_create_attention_mask_in_dataloader": True},
        **{"mock_data": None, "data_path": folder / "talks.jsonl", "split": "90,5,5", "vocab_size": None},
        **{"tokenizer_type": "SFTTokenizer", "tokenizer_model": folder, "data_cache_path": folder / "cache"},
        **{"sft_tokenizer_prompt_format": "nemotron-h-aligned", "position_embedding_type": "rope"},
    }


@pytest.mark.parametrize(
    ("ranks", "size", "method", "options"),
    [
        (3, 3, "zb-h1/vocab-2", {"num_layers": 6}),
        pytest.param(2, 2, "v-half/vocab-2", AHEAD, marks=slow),
        pytest.param(4, 2, "v-half/vocab-2", {"context_parallel_size": 2}, marks=slow),
        pytest.param(4, 2, "1f1b/vocab-2", TENSOR, marks=slow),
    ],
)
def test_conversations_train_as_in_plain_megatron(conversations, ranks, size, method, options):
    options = {**conversations, **options}
    ours, plain = (
        _merge(run_ranks(count, conversations_case, comparable_model(**options, **way), timeout=240))
        for count, way in ((ranks, way_options(method, size)), (ranks // size, {}))
    )
    tokens = [count for step in plain.steps for _, count in step.microbatches]
    assert max(tokens) < 256  # prompts and padding count in no loss
    assert_equal(ours, plain, FP32)


def captured(**changes: object) -> SimpleNamespace:
    """A microbatch of sixteen tokens in three documents, as `capture` hands it over."""
    packed = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 3, 9, 16]), "cu_seqlens_q_padded": None}
    packed = SimpleNamespace(**packed | changes.pop("packed", {}))
    arguments = {"input_ids": torch.zeros(1, 16), "packed_seq_params": packed} | changes
    return SimpleNamespace(argument=arguments.get)


SHAPES = Shapes(16, 1, 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "shapes", "context", "said"),
    [
        ({}, SHAPES, 1, None),
        ({"packed_seq_params": None, "input_ids": torch.zeros(1, 9)}, SHAPES, 1, None),
        ({"packed": {"cu_seqlens_q": torch.tensor([0, 12, 32])}}, SHAPES, 2, None),
        ({"packed_seq_params": object()}, SHAPES, 1, "in the format None to the model, but only the format thd"),
        ({"input_ids": torch.zeros(1, 12)}, SHAPES, 1, r"input_ids of shape \[1, 12\] .* here 16 tokens"),
        ({"packed": {"cu_seqlens_q": torch.tensor([0, 5, 12])}}, SHAPES, 1, "that end at position 12 to the model"),
        ({}, replace(SHAPES, sequence=8, batch=2), 1, "--micro-batch-size 2 are .* or --micro-batch-size 1"),
        ({}, replace(SHAPES, mtp_depth=1), 2, "with packed sequences does not support --context"),
        (
            {"packed": {"cu_seqlens_q_padded": torch.tensor([0, 4, 9, 16])}},
            replace(SHAPES, mtp_depth=1),
            1,
            "nor padding between documents",
        ),
    ],
)
def test_what_is_not_of_one_shape_is_refused_by_what_it_holds(changes, shapes, context, said):
    with pytest.raises(UserError, match=said) if said else nullcontext():
        check_packed(captured(**changes), shapes, context)


@pytest.mark.parametrize("own_sizes", [False, True])
def test_attention_keeps_to_each_document(own_sizes):
    """Against scores of all pairs, in fp64, with values of another size than keys."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vp.mcore.model.attention import ScaledDotProductAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self")
    query, key, value = leaves = [
        torch.randn(12, heads, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, 6))
    ]
    ends = torch.tensor([0, 5, 5, 6, 12], dtype=torch.int32)  # the second is empty
    packed = SimpleNamespace(
        cu_seqlens_q=ends[:1] if own_sizes else ends, cu_seqlens_q_padded=ends if own_sizes else None
    )
    found = attention(query, key, value, None, packed_seq_params=packed)
    assert found.shape == (12, 4 * 6)
    document = torch.bucketize(torch.arange(12), ends[1:], right=True)
    hidden = (document[:, None] != document) | torch.ones(12, 12, dtype=torch.bool).triu(1)
    scores = torch.einsum("ind,jnd->nij", query, key.repeat_interleave(2, 1)) / 8**0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("nij,jnd->ind", weights, value.repeat_interleave(2, 1)).flatten(1)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, gradient) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
