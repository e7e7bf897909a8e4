"""Test that a new run starts from the same weights as plain Megatron on the same ranks, under every schedule.

Here, Megatron draws the weights, not the harness. One step with a learning rate of zero leaves them unchanged. They are
compared by global name, bit for bit. The loss of the first step must agree within 1e-6.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_vp.mcore.model.initial_weights import moves_layers, plain_settings
from megatron_vp.mcore.settled import ChosenRows, SettledJob, Words, run_settings
from megatron_vp.schedule import FAMILIES
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, tiny_model, train, train_case
from tests.mcore import engine
from tests.mcore.case_parts import (
    DEEPSEEK,
    DISTRIBUTED,
    HYBRID,
    LLAMA,
    MOE,
    MUON,
    SEQUENCE,
    TENSOR,
    TIED,
    way_options,
)
from tests.mcore.comparison import assert_same_bits
from tests.mcore.test_launch import run_own_script

slow = pytest.mark.slow
BY_HAND = Path(__file__).parent / "schedules" / "by_hand.json"
AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
BOUND = 1e-6

# (ranks, p, schedule, method, options of both runs, options of ours and of plain Megatron's run that differ)
Case = tuple[int, int, str, str, Mapping[str, object], Mapping[str, object], Mapping[str, object]]


def _case(ranks: int, schedule: str, method: str, size: int = 2, ours=None, plain=None, **options: object) -> Case:
    return ranks, size, schedule, method, options, ours or {}, plain or {}


DEFAULT = [
    _case(2, "v-half", "none"),
    _case(
        2,
        "dualpipe-v",
        "vocab-2",
        num_layers=5,
        **MOE,
        **AHEAD,
        ours={"pipeline_model_parallel_layout": "Et|ttt||tmL"},
        plain={"pipeline_model_parallel_layout": "Etttt|tmL"},
    ),
]


def _matrix() -> Iterator[Case]:
    """Every family, with and without vocabulary passes in turn, and the options that change what is drawn and where."""
    for turn, (name, family) in enumerate(FAMILIES.items()):
        if name in {case[2] for case in DEFAULT}:
            continue
        method, size = ("vocab-2", "none")[turn % 2], (2, 4)[turn // 2 % 2]
        virtual = {"num_virtual_stages_per_pipeline_rank": 2} if family.chunks is None else {}
        yield _case(size, name, "vocab-1" if family.own_method else method, size, num_layers=2 * size, **virtual)
    yield _case(2, "dualpipe-v", "vocab-2", ours={"vocab_shards": "384,128"})
    yield _case(4, "zb-v", "vocab-2", **SEQUENCE, **LLAMA, **TIED)
    yield _case(
        2,
        "v-min",
        "vocab-1",
        **HYBRID,
        ours={"hybrid_layer_pattern": "*-|*||-"},
        plain={"hybrid_layer_pattern": "*-*|-"},
    )
    yield _case(4, "v-min", "vocab-1", **TIED, **TENSOR, ours={"vocab_shards": "0,512"})
    yield _case(4, "v-half", "none", **TENSOR, use_cpu_initialization=True)
    yield _case(4, "v-half", "vocab-2", **{**DEEPSEEK, **AHEAD, **DISTRIBUTED, "expert_model_parallel_size": 2})
    yield _case(4, "v-half", "vocab-2", **MUON, **DISTRIBUTED, bf16=True)
    yield _case(4, "v-half", "vocab-2", data_parallel_random_init=True)
    yield _case(2, "v-min", "vocab-2", fp16=True, loss_scale=1, use_mup=True, mup_base_hidden_size=16)
    yield _case(2, "dualpipe-v", "vocab-2", **TIED, **AHEAD)
    yield _case(2, "zb-v", "none", num_layers=3, plain={"pipeline_model_parallel_layout": "Et|ttL"})
    yield _case(3, str(BY_HAND), "vocab-2", 3, num_layers=6, global_batch_size=6, seed=7, init_method_std=0.1)
    yield _case(
        4,
        "v-half",
        "none",
        **HYBRID,
        **TENSOR,
        ours={"hybrid_layer_pattern": "*-|*|-|*"},
        plain={"hybrid_layer_pattern": "*-*|-*"},
    )


@cache
def _trained(ranks: int, words: tuple[str, ...]) -> Run:
    return train(ranks, words, same_weights=False)


def _job(**options: object) -> tuple[str, ...]:
    return tuple(tiny_model(**{"train_iters": 1, "lr": 0, **options}))


@pytest.mark.parametrize(
    ("ranks", "size", "schedule", "method", "options", "ours", "plain"),
    [*DEFAULT, *(pytest.param(*case, marks=slow) for case in _matrix())],
)
def test_weights_and_first_loss_are_plain_megatrons(ranks, size, schedule, method, options, ours, plain):
    options = {"pipeline_model_parallel_size": size, **options}
    found = _trained(ranks, _job(**{**way_options(f"{schedule}/{method}", **options), **options, **ours}))
    expected = _trained(ranks, _job(**{**options, **plain}))
    assert_same_bits(found.parameters, expected.parameters)
    assert any(np.ptp(array) > 0 for name, array in expected.parameters.items() if "weight" in name)
    assert len(found.losses) == 1 and found.losses == pytest.approx(expected.losses, rel=BOUND)


def started(rank: int, world_size: int, arguments: tuple[str, ...]) -> tuple[bytes, int]:
    """On a rank: the generator's state after the model was built, and how many models there are."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training import training

    build, found = training.setup_model_and_optimizer, []

    def setup(*args, **kwargs):
        built = build(*args, **kwargs)
        found.append(torch.get_rng_state().numpy().tobytes())
        gc.collect()
        found.append(sum(isinstance(each, GPTModel) for each in gc.get_objects()))
        return built

    with mock.patch.object(training, "setup_model_and_optimizer", setup):
        train_case(rank, world_size, arguments, same_weights=False)
    return tuple(found)


def test_the_generators_go_on_as_plain_megatrons_and_its_stage_is_gone():
    ours = run_ranks(2, started, _job(pipeline_model_parallel_size=2, pipeline_schedule="v-half"))
    plain = run_ranks(2, started, _job(pipeline_model_parallel_size=2))
    assert [state for state, _ in ours] == [state for state, _ in plain]
    assert [models for _, models in ours] == [2, 2] and [models for _, models in plain] == [1, 1]


def test_a_scripts_own_model_provider_builds_plain_megatrons_stage(tmp_path):
    words = [*tiny_model(pipeline_model_parallel_size=2, train_iters=1), "--stride", "2"]
    ours = run_ranks(2, run_own_script, [*words, "--pipeline-schedule", "v-half"])
    plain = run_ranks(2, run_own_script, words)
    first = [re.search(r"lm loss: (\S+)", output[-1])[1] for output in (ours, plain)]
    assert first[0] == first[1]


@slow
@pytest.mark.parametrize(
    ("ranks", "method", "options"),
    [(4, "vocab-2", {**engine.SEQUENCE_PARALLEL, **engine.LLAMA}), (2, None, engine.ONE_CALL)],
)
def test_transformer_engines_layers_start_as_in_plain_megatron(ranks, method, options):
    job = {"fused": engine.FUSED, "same_weights": False, "train_iters": 1, "lr": 0, **options}
    ours, _ = engine.trained(engine.NEWEST, ranks, **job, **engine.pipeline("v-half", method))
    plain, _ = engine.trained(engine.NEWEST, ranks, **job, pipeline_model_parallel_size=2)
    assert_same_bits(ours.parameters, plain.parameters)
    assert ours.losses == pytest.approx(plain.losses, rel=BOUND)


def extended(rank: int, world_size: int, arguments: tuple[str, ...]) -> Run | None:
    """`train_case` of a subclass that adds parameters of its own."""
    from megatron.core.models.gpt import GPTModel

    class Extended(GPTModel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = torch.nn.Parameter(torch.rand(3))
            if self.vp_stage == 1:
                self.gate = torch.nn.Parameter(torch.rand(3))

    with mock.patch("megatron.training.models.gpt.GPTModel", Extended):
        return train_case(rank, world_size, arguments, same_weights=False)


def test_parameters_of_a_users_own_come_from_plain_megatrons_nearest_stage():
    plain = run_ranks(2, extended, _job(pipeline_model_parallel_size=2))
    ours = run_ranks(2, extended, _job(pipeline_model_parallel_size=2, pipeline_schedule="v-half"))
    # The last one of each rank's chunks is recorded: virtual stage 3 on rank 0, and 2 on rank 1.
    last = plain[1].parameters["scale"]
    for run in ours:
        np.testing.assert_array_equal(run.parameters["scale"], last)


def counted(rank: int, world_size: int, arguments: tuple[str, ...]) -> int:
    """On a rank: how many chunks of plain Megatron's it builds in a run."""
    from megatron_vp.mcore.model import initial_weights

    with mock.patch.object(initial_weights, "_fill", wraps=initial_weights._fill) as started:
        train_case(rank, world_size, arguments, same_weights=False)
    return started.call_count


def test_a_run_that_loads_a_checkpoint_does_not_build_plain_megatrons_stage(tmp_path):
    job = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "v-half", "save": tmp_path, "load": tmp_path}
    words = _job(**job, train_iters=2, save_interval=1, exit_interval=1)
    assert run_ranks(2, counted, words) == [1, 1]
    assert run_ranks(2, counted, words) == [0, 0]


def _settled(layout: str | None = None, pattern: str | None = None, **arguments: object) -> SettledJob:
    """A job whose user gave this layout or pattern, and whose arguments are these by now."""
    defaults = {"pipeline_model_parallel_layout": None, "hybrid_layer_pattern": None, "mtp_num_layers": None}
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4}
    ours = {"pipeline_schedule": "v-half", "vocab_parallel": True, "offload_chunks": "0"}
    args = argparse.Namespace(**defaults | sizes | ours | arguments)
    asked = argparse.Namespace(pipeline_model_parallel_layout=layout, hybrid_layer_pattern=pattern)
    return SettledJob(args, run_settings(args), asked, ChosenRows(), None, {}, Words(), None)


def _layers(**given: object) -> list[str]:
    layout = plain_settings(_settled(**given))["pipeline_model_parallel_layout"].layout
    stages = [row[chunk] for chunk in range(len(layout[0])) for row in layout]
    return ["".join(kind.name[0] for kind in stage) for stage in stages]


def _pattern(**given: object) -> str:
    settings = plain_settings(_settled(**given))
    assert settings["virtual_pipeline_model_parallel_size"] is settings["pipeline_model_parallel_layout"] is None
    return settings["hybrid_layer_pattern"]


def test_neighbouring_segments_of_a_v_are_one_stage_of_plain_megatron():
    assert _layers() == ["edd", "ddl"]
    assert _layers(num_layers=5, mtp_num_layers=1) == ["edd", "dddml"]
    assert _layers(layout="Et|tt||tmL") == ["eddd", "dml"]
    assert _pattern(hybrid_layer_pattern="*-|*||-/*-/*-") == "*-*|-/*-/*-"


def test_chunks_in_rounds_and_layers_that_we_cut_ourselves_start_as_megatron_would_cut_them():
    interleaved = {"pipeline_schedule": "interleaved", "num_layers": 8}
    assert _layers(**interleaved) == ["edd", "dd", "dd", "ddl"]
    assert not moves_layers(_settled(**interleaved))
    given = {"layout": "Et|ttt|t|tttL", "pipeline_model_parallel_layout": "Et|ttt|t|tttL"}
    assert not moves_layers(_settled(**interleaved, **given))
    chosen = {"pipeline_schedule": "1f1b", "virtual_pipeline_model_parallel_size": None}
    assert moves_layers(_settled(**chosen, pipeline_model_parallel_layout="Et|tttL"))
    assert not moves_layers(_settled(**chosen, pipeline_model_parallel_layout="Ett|ttL"))
    chosen |= {"pattern": "*-*-"}
    assert moves_layers(_settled(**chosen, hybrid_layer_pattern="*-*|-"))
    assert _pattern(**chosen, hybrid_layer_pattern="*-*|-") == "*-|*-"
    assert not moves_layers(_settled(**chosen, hybrid_layer_pattern="*-|*-"))
    assert moves_layers(_settled())
