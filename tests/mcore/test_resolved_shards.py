"""Test how a starting job resolves `--vocab-shards` to rows, and to layers if no layout is given, on every rank."""

from __future__ import annotations

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.planning.balanced import balanced
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.jobs.layout_text import layers_in
from megatron_vp.jobs.pattern_text import Pattern
from megatron_vp.mcore.start.preflight import check_job, describe_job
from megatron_vp.schedule import VocabMethod
from tests.harness.training import comparable_model, tiny_model, train
from tests.mcore.case_parts import DISTRIBUTED, FP32
from tests.mcore.comparison import assert_equal

SEVEN = {
    "num_layers": 7,
    "hidden_size": 256,
    "vocab_size": 16383,
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 32,
    "vocab_parallel": True,
}
"""Seven layers on four ranks and a vocabulary that weighs as much as some of them."""


def resolved(ranks=4, **changes):
    return settled_job(ranks, **changes).args


def settled_job(ranks=4, **changes):
    return check_job(["--cpu", *tiny_model(**SEVEN | changes)], ranks)


def test_balanced_takes_what_the_cost_model_chooses():
    checked = settled_job(vocab_shards="balanced")
    args = checked.args
    plan = Plan("1f1b", VocabMethod.VOCAB_2)
    expected, gain = balanced(job_of({**vars(args), "padded_vocab_size": 16384}, 4), plan, HARDWARE["cpu"])
    assert sum(args.vocab_rows) == 16384 and args.vocab_rows == expected.vocab_rows
    assert layers_in(args.pipeline_model_parallel_layout) == expected.layers and sum(expected.layers) == 7
    said = describe_job(checked, 4)
    (line,) = [line for line in said if line.startswith("vocabulary rows by pipeline rank: ")]
    assert ",".join(map(str, args.vocab_rows)) in line and f"{gain:.3f} times as fast" in line
    assert f"layers by stage: {','.join(map(str, expected.layers))}" in said


HYBRID = {
    "num_layers": None,
    "hybrid_layer_pattern": "*-*-*-*-*-*-*-",
    "spec": ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"],
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_a_hybrid_model_without_bars_gets_them_with_its_rows(schedule):
    args = resolved(**HYBRID, vocab_shards="balanced", pipeline_schedule=schedule)
    values = {**vars(args), "padded_vocab_size": 16384, "hybrid_layer_pattern": HYBRID["hybrid_layer_pattern"]}
    expected, _ = balanced(job_of(values, 4), Plan(schedule, VocabMethod.VOCAB_2), HARDWARE["cpu"])
    found = Pattern.parse(args.hybrid_layer_pattern)
    assert found.letters == HYBRID["hybrid_layer_pattern"] and found.layers == expected.layers
    assert args.vocab_rows == expected.vocab_rows and args.pipeline_model_parallel_layout is None


def test_a_v_without_bars_gets_even_ones():
    args = resolved(**HYBRID, vocab_parallel=None, pipeline_schedule="v-half")
    assert Pattern.parse(args.hybrid_layer_pattern).layers == (1, 2, 2, 2, 1, 2, 2, 2)


def test_a_layout_stays_and_rows_follow_it():
    layout = "Ettt|t|t|ttL"
    args = resolved(vocab_shards="balanced", pipeline_model_parallel_layout=layout)
    assert args.pipeline_model_parallel_layout == layout
    assert args.vocab_rows[0] == min(args.vocab_rows) and args.vocab_rows[1] > args.vocab_rows[3]


def test_a_layout_that_is_chosen_with_the_rows_has_the_multi_token_prediction_layers():
    args = resolved(vocab_shards="balanced", mtp_num_layers=1, position_embedding_type="rope")
    assert args.pipeline_model_parallel_layout.endswith("mL") and args.vocab_rows is not None


def test_a_balanced_run_trains_as_plain_megatron_and_writes_what_it_chose(tmp_path):
    job = {"num_layers": 7, "train_iters": 3, "global_batch_size": 12}
    plain = train(1, comparable_model(**job))
    ours = {"pipeline_model_parallel_size": 4, "vocab_parallel": True, "vocab_shards": "balanced"}
    run = train(4, comparable_model(**job, **ours, tensorboard_dir=tmp_path))
    assert_equal(run, plain, FP32)
    written = read_job_config([tmp_path / "resolved_config.yaml"], [])
    assert sum(written["vocab_rows"]) == 40 and len(set(written["vocab_rows"])) > 1
    assert sum(layers_in(written["pipeline_model_parallel_layout"])) == 7


def test_balanced_shards_that_optimizer_state_does_not_fit_are_refused(tmp_path):
    job = {**SEVEN, **DISTRIBUTED, "num_layers": 4, "hidden_size": 32, "vocab_size": 511, "global_batch_size": 8}
    job |= {"pipeline_model_parallel_size": 2, "save": tmp_path, "load": tmp_path, "save_interval": 10}
    train(2, tiny_model(**job, vocab_shards="96,416", train_iters=1))
    with pytest.raises(UserError, match=r"--vocab-shards was 96,416 in the run that wrote it and is .*: give the old"):
        check_job(["--cpu", *tiny_model(**job, train_iters=1)], 2, rehearse=lambda job: ())
