"""Test that `megatron-vp check` says of a job what its start says, with jobs of two ranks that start or die at once."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout

import pytest

from tests.harness.ranks import run_ranks, run_ranks_to_their_end
from tests.harness.training import tiny_model
from tests.mcore.faults import errors, train_with_fault
from tests.mcore.test_option_survey import make_data

DATA = {"mock_data": None, "split": "8,1,1", "eval_iters": 1}
BY_SPLIT = {**DATA, "split": None, "per_split_data_args_path": "{data}/sets.json"}
BLEND = ["0.5", "{data}/a", "0.5", "{data}/b"]
MOE = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "core_attention": "sdpa",
    "kv_lora_rank": 16,
}
SAVED = {"save": "{folder}/save", "save_interval": 100}

STARTS = {
    "a blend in a cache": {**DATA, "data_path": BLEND, "data_cache_path": "{folder}/cache"},
    "datasets by split": BY_SPLIT,
    "experts in bf16": {
        **MOE,
        **LATENT,
        **SAVED,
        "load": "{folder}/save",
        "use_distributed_optimizer": True,
        "bf16": True,
        "overlap_grad_reduce": True,
    },
}

DIES = {
    "no type of tokenizer": {"tokenizer_type": None},
    "no folder of the tokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "{folder}/none"},
    "no model of the tokenizer": {"tokenizer_type": "HuggingFaceTokenizer"},
    "a name on the Hub": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "nobody/has-this"},
    "no data": {"mock_data": None},
    "a blend by size with a part shorter than a sequence": {**DATA, "data_path": ["{data}/a", "{data}/b"]},
    "a weight of 0": {**DATA, "data_path": ["0", "{data}/a", "1", "{data}/b"]},
    "a cache that cannot be written": {**DATA, "data_path": "{data}/a", "data_cache_path": "/dev/null/cache"},
    "biases of experts": {**MOE, "disable_bias_linear": None, "moe_shared_expert_intermediate_size": 16},
    "no package for fault tolerance": {"enable_ft_package": True, **SAVED},
    "an optimizer of Transformer Engine": {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True},
    "no file of merges": {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": "{data}/a.idx",
        "merge_file": "{data}/no",
    },
    "a dataset that is not there": {**DATA, "data_path": "{data}/none"},
    "an index that is cut off": {**DATA, "data_path": "{data}/cut"},
    "a part without a document": {**DATA, "data_path": "{data}/c", "split": "1000,1,1"},
    "groups that do not divide the experts": {**MOE, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
    "a description that is not JSON": {"heterogeneous_layers_config_encoded_json": "nothing"},
    "a letter that is no layer": {"hybrid_layer_pattern": "MQ|M-", "num_layers": None},
    "no length of the decay": {"lr_decay_style": "WSD"},
    "overlapped communication": {"tp_comm_overlap": True},
}

DRAWN = ("datasets by split", "a weight of 0", "no folder of the tokenizer", "biases of experts")
IN_OTHER_WORDS = {"a cache that cannot be written"}
"""A check tests whether the folder could be written."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The datasets a, b and c, and an index that is cut off."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    for end, length in ((".bin", None), (".idx", 40)):
        (folder / f"cut{end}").write_bytes((folder / f"a{end}").read_bytes()[:length])
    return folder


def checked(_rank, _world_size, words):
    """The exit status of `megatron-vp check`, and what it says on standard error."""
    from megatron_vp.cli.app import main

    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said), pytest.raises(SystemExit) as end:
        main(["check", "--ranks", "2", "--cpu", *words])
    return end.value.code or 0, said.getvalue()


def to_the_end(rank, world_size, words):
    try:
        train_with_fault(rank, world_size, words)
    except SystemExit as end:
        os._exit(end.code or 0)


def words_of(changes, vocab_parallel, data, folder):
    ours = {"pipeline_model_parallel_size": 2, "vocab_parallel": vocab_parallel or None}
    places = {"{data}": str(data), "{folder}": str(folder)}
    words = tiny_model(**ours, **changes)
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    return words


WAYS = ("plain", "vocab-parallel")
CASES = [pytest.param(name, way == WAYS[1], False, id=f"{name}-{way}") for name in DRAWN for way in WAYS]
CASES += [
    pytest.param(name, turn % 2 > 0, True, id=f"{name}, started-{WAYS[turn % 2]}", marks=pytest.mark.slow)
    for turn, name in enumerate((*STARTS, *DIES))
]


@pytest.mark.parametrize(("name", "vocab_parallel", "started"), CASES)
def test_a_check_says_what_the_start_says(data, tmp_path, name, vocab_parallel, started):
    words = words_of(STARTS.get(name, DIES.get(name)), vocab_parallel, data, tmp_path)
    ((status, said),) = run_ranks(1, checked, words)
    assert (status == 0) == (name in STARTS), said
    assert list(tmp_path.iterdir()) == []
    if name in DIES:
        assert status == 2 and said.startswith("megatron-vp: error: ") and said.count("\n") == 1, said
    if started:
        ends = run_ranks_to_their_end(2, to_the_end, [*words, "--exit-interval", "1"])
        assert [end for end, _ in ends] == [0, 0] if name in STARTS else 2 in {end for end, _ in ends}, ends
        reasons = [line for _, output in ends for line in errors(output)]
        if name in DIES and name not in IN_OTHER_WORDS:
            assert said.removeprefix("megatron-vp: error: ").strip() in reasons
