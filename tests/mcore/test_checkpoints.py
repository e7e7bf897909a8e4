"""Checkpoints: moved between layouts, resumed, and refused where they are not there, damaged, or do not fit."""

from __future__ import annotations

import itertools
import shutil
import sys
from functools import cache

import pytest

from tests.harness import run_ranks
from tests.harness.training import Run, tiny_model, train
from tests.mcore.comparison import assert_same_bits

ROWS = 40  # uneven on three ranks
LAYOUTS = {
    "plain/1": (1, {}),
    "plain/2": (2, {}),
    "plain/3": (3, {}),
    "vocab-2/2": (2, {"vocab_parallel": True}),
    "vocab-2/3": (3, {"vocab_parallel": True}),
    "vocab-1/3": (3, {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-1"}),
    "interleaved/2": (
        2,
        {"vocab_parallel": True, "pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 3},
    ),
    "v-half/2": (2, {"vocab_parallel": True, "pipeline_schedule": "v-half"}),
    "whole v-half/2": (2, {"pipeline_schedule": "v-half"}),
    "v-half/3": (3, {"vocab_parallel": True, "pipeline_schedule": "v-half"}),
}
DISTRIBUTED = {"use_distributed_optimizer": True}
RESHARDABLE = {**DISTRIBUTED, "dist_ckpt_optim_fully_reshardable": True}

# Written by, read by, tied, optimizer options.
MOVES = [
    ("plain/2", "vocab-2/3", False, {}),
    ("vocab-1/3", "plain/1", True, RESHARDABLE),
    ("v-half/2", "plain/3", True, {}),
    ("plain/1", "v-half/3", False, {}),
]
EVERY_MOVE = [
    (written, read, False, optimizer)
    for written, read in itertools.permutations(LAYOUTS, 2)
    for optimizer in ({}, RESHARDABLE)
    if (written, read, False, optimizer) not in MOVES
] + [("vocab-2/2", "vocab-1/3", True, {})]


def _arguments(layout: str, tied: bool, **changes: object) -> list[str]:
    size, options = LAYOUTS[layout]
    return tiny_model(
        **{
            "num_layers": 6,
            "lr": 1e-3,
            "train_iters": 4,
            "pipeline_model_parallel_size": size,
            "vocab_size": ROWS - 1,
            "make_vocab_size_divisible_by": 4,
            "untie_embeddings_and_output_weights": not tied,
            **options,
            **changes,
        }
    )


@cache
def _uninterrupted(layout: str, tied: bool = False, **options: object) -> Run:
    return train(LAYOUTS[layout][0], _arguments(layout, tied, **options))


def _resumed(layout: str, tied: bool, folder: object, **options: object) -> Run:
    return train(LAYOUTS[layout][0], _arguments(layout, tied, load=folder, **options), same_weights=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory of a checkpoint at iteration 2, written once by each layout, optimizer and kind of tying."""
    folders = {}

    def folder(layout, tied, optimizer):
        key = layout, tied, *optimizer
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("checkpoint")
            saving = {"save": folders[key], "save_interval": 2, "exit_interval": 2}
            train(LAYOUTS[layout][0], _arguments(layout, tied, **saving, **optimizer))
        return folders[key]

    return folder


@pytest.mark.parametrize(
    ("writer", "reader", "tied", "optimizer"), MOVES + [pytest.param(*m, marks=pytest.mark.slow) for m in EVERY_MOVE]
)
def test_training_continues_as_if_nothing_had_happened(written, writer, reader, tied, optimizer):
    rest = _resumed(reader, tied, written(writer, tied, optimizer), **optimizer)
    # The fourth loss comes after an update by the optimizer's restored state.
    assert rest.losses == pytest.approx(_uninterrupted("plain/1", tied).losses[2:], rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [44, 48])
def test_another_padding_changes_what_it_changes_in_plain_megatron(written, rows):
    other = {"make_vocab_size_divisible_by": rows}
    folder = written("plain/2", False, {})
    plain = _resumed("plain/1", False, folder, **other)
    for layout in ("vocab-2/3", "v-half/2"):
        assert _resumed(layout, False, folder, **other).losses == pytest.approx(plain.losses, rel=2e-6)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("vocab-2/2", DISTRIBUTED),
        pytest.param("v-half/3", {}, marks=pytest.mark.slow),
        pytest.param("interleaved/2", RESHARDABLE, marks=pytest.mark.slow),
    ],
)
def test_resuming_at_the_same_layout_gives_the_same_bits(written, layout, options):
    whole = _uninterrupted(layout, **options)
    rest = _resumed(layout, False, written(layout, False, options), **options)
    assert rest.losses == whole.losses[2:]
    assert_same_bits(rest.parameters, whole.parameters)


def refusals(_rank, _world_size, cases):
    """What parsing says to each case's arguments; None where they are accepted."""
    import torch

    import pretrain_gpt_vp as script
    from megatron_vp.errors import UserError

    script.prepare()
    from megatron.training.training import destroy_global_state

    said = []
    for arguments in cases:
        sys.argv = ["pretrain_gpt_vp.py", *arguments]
        try:
            script.parse_and_validate_args()
            destroy_global_state()
            said.append(None)
        except UserError as error:
            said.append(str(error))
        assert not torch.distributed.is_initialized()
    return said


def test_what_is_no_checkpoint_or_does_not_fit_is_refused_before_anything_starts(written, tmp_path):
    good = written("vocab-2/2", False, DISTRIBUTED)

    def damaged(name):
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name, tmp_path / name / "iter_0000002"

    cut, cut_step = damaged("cut")
    first_file = min(cut_step.glob("*.distcp"))
    first_file.write_bytes(first_file.read_bytes()[:-1000])
    without_file, step = damaged("without a file")
    min(step.glob("*.distcp")).unlink()
    without_end, step = damaged("without its end")
    (step / ".metadata").unlink()
    unreadable, step = damaged("unreadable")
    (step / ".metadata").write_bytes(b"no metadata")
    unmarked, step = damaged("without its mark")
    (step / "metadata.json").write_bytes(b"")
    wrong_tracker, _ = damaged("tracker")
    (wrong_tracker / "latest_checkpointed_iteration.txt").write_text("twelve")
    empty_tracker, step = damaged("empty tracker")
    shutil.copytree(unmarked / "iter_0000002", empty_tracker / "iter_0000004")
    (empty_tracker / "latest_checkpointed_iteration.txt").write_text("")
    cases = [
        ({"load": good}, None),
        ({"load": tmp_path / "new", "save": tmp_path / "new", "save_interval": 2}, None),
        ({"load": tmp_path / "no such"}, "holds no checkpoint"),
        ({"load": good, "ckpt_step": 3}, "iter_0000003 is not there; use --ckpt-step 2"),
        ({"load": cut}, f"{first_file} is cut short"),
        ({"load": without_file}, "is missing"),
        ({"load": without_end}, "lacks .metadata"),
        ({"load": unreadable}, ".metadata is corrupt"),
        ({"load": unmarked}, "metadata.json is corrupt"),
        ({"load": wrong_tracker}, "holds 'twelve' and not an iteration"),
        ({"load": empty_tracker}, "holds '' and not an iteration; use --ckpt-step 2"),
        ({"save": first_file / "below", "save_interval": 2}, "is a file; choose another place"),
        ({"load": good, **DISTRIBUTED}, "vocab_parallel was True, here it is False: write it with --dist-ckpt-optim"),
        ({"load": good, **DISTRIBUTED, "no_load_optim": True}, None),
    ]
    layout = {"pipeline_model_parallel_layout": "Et*2|t|t|t*2L", "dist_ckpt_optim_fully_reshardable": False}
    laid_out = written("v-half/2", False, {**DISTRIBUTED, **layout})
    interleaved = {**DISTRIBUTED, **layout, **LAYOUTS["vocab-2/2"][1], "pipeline_schedule": "interleaved"}
    cases += [
        ({"load": laid_out, **interleaved, "pipeline_model_parallel_size": 2}, "V-shaped pipeline_schedule was True"),
        (
            {"save": tmp_path / "a", "save_interval": 2, "async_save": True, "use_persistent_ckpt_worker": True},
            "use --async-strategy mcore",
        ),
    ]
    said, other = run_ranks(2, refusals, [_arguments("plain/1", False, **changes) for changes, _ in cases])
    assert said == other
    for (changes, expected), found in zip(cases, said, strict=True):
        assert (found is None) == (expected is None) and (expected or "") in (found or ""), (changes, found)
        assert "\n" not in (found or "")
