"""Test frozen vocabulary layers, frozen layers and adapters: plain Megatron's gradients, and no work for frozen
weights.

These tests use Megatron's loop; test_enable.py has the tests for a user's own loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from unittest import mock

import pytest

from tests.harness import run_ranks, run_ranks_to_their_end
from tests.harness.training import Run, comparable_model, tiny_model, train, train_case
from tests.mcore import frozen
from tests.mcore.case_parts import (
    AHEAD,
    ALL_TO_ALL,
    BOTH,
    FULL_RECOMPUTE,
    MOE,
    PAIRS,
    SEQUENCE,
    TIED,
    way_options,
)
from tests.mcore.comparison import assert_equal, assert_same_bits
from tests.mcore.engine import pipeline
from tests.vocab.test_output import Launches

BOUND = 1e-6

# (what is frozen, options, schedule and algorithm)
CASES = [("adapted", {}, "v-half/vocab-2")]
SLOW_CASES = [
    *(("vocabulary", {}, method) for method in ("1f1b/vocab-1", "zb-h1/none")),
    *(("vocabulary", TIED, method) for method in ("1f1b/vocab-2", "v-half/vocab-1")),
    *(("all_but_projection", BOTH, method) for method in ("interleaved/vocab-1", "zb-h1/vocab-2")),
    *(("every_other_layer", {}, method) for method in ("1f1b/vocab-2", "v-half/none")),
    ("adapted", {}, "zb-h1/vocab-2"),
    ("embedding", AHEAD, "v-half/vocab-1"),
    ("output_layer", {}, "1f1b/vocab-2"),
    ("vocabulary", {**AHEAD, **TIED}, "v-half/vocab-2"),
    ("first_layers", {**SEQUENCE, **BOTH}, "v-half/vocab-1"),
    ("vocabulary", {**FULL_RECOMPUTE, **MOE}, "interleaved/vocab-1"),
]


def _run(what: str, ranks: int, options: Mapping[str, object], **changes: object) -> Run:
    arguments = {
        "global_batch_size": 8 * (2 if "overlap_grad_reduce" in options else 1),
        "lr": 2e-6,
        **options,
        **changes,
    }
    return train(ranks, comparable_model(**arguments), hook=getattr(frozen, what))


def _ranks(options: Mapping[str, object]) -> int:
    """Of a stage: its tensor ranks, in two replicas where they overlap what they exchange."""
    return (2 if "overlap_grad_reduce" in options else 1) * (2 if "tensor_model_parallel_size" in options else 1)


@cache
def _plain(what: str, options: tuple[tuple[str, object], ...]) -> Run:
    """Plain Megatron, one stage, as many replicas."""
    return _run(what, _ranks(dict(options)), dict(options))


@pytest.mark.parametrize(
    ("what", "options", "method"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_what_is_trained_is_trained_as_in_plain_megatron(what, options, method):
    plain = _plain(what, tuple(options.items()))
    ours = _run(what, 2 * _ranks(options), options, **way_options(method, 2))
    assert_equal(ours, plain, BOUND)
    assert plain.steps[0].gradients.keys() < plain.parameters.keys()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["interleaved/vocab-2", "dualpipe-v/none"])
def test_what_is_trained_in_pairs_of_passes_is_trained_as_in_plain_megatron(way):
    job = {**ALL_TO_ALL, "pipeline_model_parallel_size": 2, "global_batch_size": 24}
    plain = _run("every_other_layer", 4, job)
    ours = _run("every_other_layer", 4, job, **way_options(way, **job), **PAIRS)
    assert_equal(ours, plain, BOUND)
    assert ours.pairs


def counted(rank: int, ranks: int, arguments: list[str], hook: Callable[[list], list] | None) -> dict[str, float]:
    """Elements of gradient buffers and optimizer state of a rank, and launches in its passes T and IB."""
    from megatron.training import training

    from megatron_vp.runtime.sharded_vocab_passes import ShardedVocabPasses

    found = {"launches of T": 0, "launches of IB": 0}

    def launching(name: str, original: Callable) -> Callable:
        def run(*args: object) -> None:
            with Launches() as launches:
                original(*args)
            found[name] += len(launches.names)

        return run

    def setup(*args: object, **kwargs: object) -> tuple:
        built = build(*args, **kwargs)
        found["gradients"] = sum(buffer.grad_data.numel() for chunk in built[0] for buffer in chunk.buffers)
        found["parameters"] = sum(parameter.numel() for chunk in built[0] for parameter in chunk.parameters())
        kept.append(built[1])
        return built

    build, kept = training.setup_model_and_optimizer, []
    t_pass, ib_pass = ShardedVocabPasses._output_t, ShardedVocabPasses._embed_backward
    with (
        mock.patch.object(training, "setup_model_and_optimizer", setup),
        mock.patch.object(ShardedVocabPasses, "_output_t", launching("launches of T", t_pass)),
        mock.patch.object(ShardedVocabPasses, "_embed_backward", launching("launches of IB", ib_pass)),
    ):
        train_case(rank, ranks, arguments, same_weights=False, hook=hook)
    states = (state for each in kept[0].chained_optimizers for state in each.optimizer.state.values())
    found["state"] = sum(each.numel() for state in states for each in state.values() if each.dim())
    return found


def test_a_frozen_vocabulary_takes_no_gradients_no_state_and_no_time():
    job = tiny_model(train_iters=2, **pipeline("1f1b", "vocab-2"))
    trained, kept = (run_ranks(2, counted, job, hook) for hook in (None, frozen.vocabulary))
    rows = 2 * 32 * 512 // 2  # of both layers, on either rank
    for before, after in zip(trained, kept, strict=True):
        assert before["parameters"] == after["parameters"]
        assert before["gradients"] - after["gradients"] == rows and before["state"] - after["state"] == 2 * rows
        assert before["launches of T"] > 0 and not after["launches of T"] and not after["launches of IB"]


def to_its_end(rank: int, ranks: int, arguments: list[str], hook: Callable[[list], list]) -> None:
    """A run that ends as the script ends one."""
    from megatron_vp.mcore.start.launch import one_line_errors

    with one_line_errors():
        train_case(rank, ranks, arguments, hook=hook)


def test_a_layer_frozen_where_plain_megatron_has_it_is_frozen_on_all_ranks():
    ours = _run("first_rank_only", 2, {}, **way_options("1f1b/vocab-2", 2))
    assert_equal(ours, _plain("embedding", ()), BOUND)


def test_an_adapter_on_a_vocabulary_layer_is_refused_on_all_ranks():
    said, job = "output_layer is a Adapter of ", tiny_model(**pipeline("1f1b", "vocab-2"))
    ends = run_ranks_to_their_end(2, to_its_end, job, frozen.adapted_output_layer)
    assert [status for status, _ in ends] == [2, 2]
    assert any(re.search(f"^error: .*{said}", output, re.MULTILINE) for _, output in ends), ends


@pytest.mark.slow
def test_a_fresh_run_starts_with_plain_megatrons_weights():
    job = {"train_iters": 1, "lr": 0, "pipeline_model_parallel_size": 2}
    hook = frozen.vocabulary
    ours = train(2, tiny_model(**job | pipeline("zb-v", "vocab-2")), same_weights=False, hook=hook)
    plain = train(2, tiny_model(**job), same_weights=False, hook=hook)
    assert_same_bits(ours.parameters, plain.parameters)
    assert ours.losses == pytest.approx(plain.losses, rel=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "distributed"), [("vocabulary", True), ("adapted", False)])
def test_checkpoints_resume_exactly_and_move_to_plain_megatron_and_other_sizes(tmp_path, what, distributed):
    hook = getattr(frozen, what)
    options = {"use_distributed_optimizer": distributed, "dist_ckpt_optim_fully_reshardable": distributed}
    v_half, rows = pipeline("v-half", "vocab-2"), {"vocab_shards": "16,24"}

    def part(ranks: int, ends: int, save: str | None, load: str | None = None, **changes: object) -> Run:
        places = {"save": save and tmp_path / save, "load": load and tmp_path / load, "save_interval": 1000}
        job = {"lr": 1e-4, **options, **places, "train_iters": ends, "override_opt_param_scheduler": True, **changes}
        return train(ranks, comparable_model(**job), same_weights=load is None, hook=hook)

    whole = part(2, 6, None, **v_half)
    first = part(2, 2, "first", **v_half)
    again = part(2, 6, None, "first", **v_half)
    assert first.losses + again.losses == whole.losses
    assert_same_bits(again.parameters, whole.parameters)
    moved = part(1, 4, "plain", "first")
    last = part(2, 6, None, "plain", **pipeline("1f1b", "vocab-1"), **rows)
    for numbers in ("losses", "grad_norms"):
        found = [each for run in (first, moved, last) for each in getattr(run, numbers)]
        assert found == pytest.approx(getattr(whole, numbers), rel=BOUND), numbers
    for name, frozen_weight in whole.parameters.items():
        if name not in whole.steps[0].gradients:
            assert_same_bits({name: last.parameters[name]}, {name: frozen_weight})
