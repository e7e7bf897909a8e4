"""Test checkpoints: moved between layouts, resumed, and refused if missing, damaged or unsuitable."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_vp.errors import UserError
from tests.harness import run_ranks, run_ranks_to_their_end
from tests.harness.training import Run, tiny_model, train
from tests.mcore.case_parts import (
    ASYNCHRONOUS,
    BOTH,
    DISTRIBUTED,
    DROPOUT,
    FP32,
    HYBRID,
    MOE,
    MOVES,
    PAIRS,
    RESHARDABLE,
    SEQUENCE,
    chunks,
)
from tests.mcore.comparison import assert_same_bits
from tests.mcore.faults import errors, refusal, train_with_fault

AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
LONG_HYBRID = {**HYBRID, "hybrid_layer_pattern": "*-" * 6}
_SIZES = {
    "p": "pipeline_model_parallel_size",
    "t": "tensor_model_parallel_size",
    "e": "expert_model_parallel_size",
}


@dataclass(frozen=True)
class Layout:
    """How a run is laid out.

    ranks: processes.
    stages: virtual stages of the pipeline.
    options: long argument names with underscores.
    """

    ranks: int
    stages: int
    options: Mapping[str, object]

    @classmethod
    def read(cls, text: str) -> Layout:
        """A layout written as `METHOD [pN] [tN] [dN] [eN] [VN] [o1] [rN,N...]`.

        METHOD is `plain` or `schedule/algorithm`, the algorithm `none` without --vocab-parallel. p, t and e are sizes
        of pipeline, tensor and expert parallelism, d is the number of replicas, each 1 where it is left out. V is the
        number of rows that --make-vocab-size-divisible-by pads the vocabulary to, r the rows of each pipeline rank.
        With o1, forwards and backwards run as one.
        """
        method, *words = text.split()
        rows = next((word[1:] for word in words if word[0] == "r"), None)
        sizes = {"p": 1, "t": 1, "d": 1} | {word[0]: int(word[1:]) for word in words if word[0] != "r"}
        schedule, _, algorithm = method.partition("/")
        options: dict[str, object] = {_SIZES[letter]: sizes[letter] for letter in _SIZES if letter in sizes}
        if "V" in sizes:
            options["make_vocab_size_divisible_by"] = sizes["V"] // sizes["t"]
        if "o" in sizes:
            options |= PAIRS
        if algorithm:
            options["pipeline_schedule"] = schedule
        if algorithm not in ("", "none"):
            options |= {"vocab_parallel": True, "vocab_parallel_algorithm": algorithm, "vocab_shards": rows or "even"}
        if schedule == "interleaved":
            options["num_virtual_stages_per_pipeline_rank"] = 2
        return cls(sizes["p"] * sizes["t"] * sizes["d"], sizes["p"] * chunks(method), options)


BY_NAME = {move.name: move for move in MOVES}
RUNS = [
    pytest.param(
        move.name,
        other,
        marks=() if move.default and not number else pytest.mark.slow,
        id=f"{move.name}: {move.start} and {other}",
    )
    for move in MOVES
    for number, other in enumerate(move.others)
]
DEFAULT_FORM = ("1f1b/vocab-2 p2", DISTRIBUTED)
slow = pytest.mark.slow

# Layout and options: each family, each method and each option at least once.
IN_BUCKETS = ("1f1b/vocab-2 p2 d2", {**BOTH, **RESHARDABLE, "ddp_bucket_size": 2000})
RESUMED = [
    DEFAULT_FORM,
    *(
        pytest.param(layout, options, marks=slow, id=" ".join((layout, *options)))
        for layout, options in [
            IN_BUCKETS,
            ("interlaced/vocab-1 p3", {"fp16": True, "initial_loss_scale": 1024}),
            ("zb-v/vocab-1 p2", DISTRIBUTED),
            ("v-half/vocab-1 p2 d2", {**BOTH, "bf16": True}),
            ("v-min/vocab-2 p4", DROPOUT),
            ("zb-h1/none p2 d2", {**DROPOUT, **BOTH}),
            ("interleaved/none p2 t2", {**SEQUENCE, **DISTRIBUTED}),
            ("1f1b/vocab-1 p3", ASYNCHRONOUS),
            ("v-half/vocab-2 p2", {**AHEAD, **DISTRIBUTED}),
            ("interleaved/vocab-1 p2", {**LONG_HYBRID, **DISTRIBUTED}),
            ("1f1b/vocab-2 p2 d2 e2", {**MOE, **BOTH}),
            ("v-half/vocab-2 p2 d2 r0,40", {**BOTH, "untie_embeddings_and_output_weights": None}),
        ]
    ),
]


def _arguments(layout: Layout, **changes: object) -> list[str]:
    pattern = changes.get("hybrid_layer_pattern")
    if pattern:
        cuts = [len(pattern) * stage // layout.stages for stage in range(layout.stages + 1)]
        segments = [pattern[start:end] for start, end in pairwise(cuts)]
        changes |= {"hybrid_layer_pattern": "|".join(segments), "num_virtual_stages_per_pipeline_rank": None}
    # Forty rows are uneven on three ranks.
    sizes = {"num_layers": 12, "vocab_size": 39, "make_vocab_size_divisible_by": 4}
    # A checkpoint holds how far the learning rate has come, too.
    rate = {"lr": 1e-3, "lr_decay_style": "linear", "lr_decay_iters": 12}
    return tiny_model(**sizes | rate | dict(layout.options) | changes)


@pytest.fixture(scope="module")
def train_along(tmp_path_factory):
    """Trains some steps in each of several layouts, through checkpoints: the runs, and the last checkpoint's directory.

    What two paths begin with runs once.
    """
    done = {}

    def along(
        layouts: tuple[str, ...], steps: tuple[int, ...], options: Mapping[str, object]
    ) -> tuple[list[Run], Path | None]:
        if not layouts:
            return [], None
        key = layouts, steps, repr(options)
        if key not in done:
            before, load = along(layouts[:-1], steps[:-1], options)
            save = tmp_path_factory.mktemp("checkpoint")
            layout = Layout.read(layouts[-1])
            folders = {"load": load, "save": save, "save_interval": 1000}
            # A checkpoint also says how long its run was to be.
            until = {"train_iters": sum(steps), "override_opt_param_scheduler": True}
            arguments = _arguments(layout, **options, **folders, **until)
            done[key] = [*before, train(layout.ranks, arguments, same_weights=not before)], save
        return done[key]

    return along


@pytest.mark.parametrize(("name", "other"), RUNS)
def test_training_continues_as_if_nothing_had_happened(train_along, name, other):
    move = BY_NAME[name]
    if "optimizer" in move.options:
        pytest.importorskip("emerging_optimizers", reason="pip install emerging-optimizers")
    path, steps = (move.start, other, move.start), (2, 0 if move.carried else 2, 2)
    moved, _ = train_along(path, steps, move.options)
    if " V" in move.start:  # padding rows take part in the softmax, so that another number of them is another loss
        path = tuple(f"plain {layout.split()[-1]}" for layout in path)
        unmoved, _ = train_along(path, steps, move.options)
    else:
        unmoved, _ = train_along((move.start,), (6,), move.options)
    for numbers in ("losses", "grad_norms"):
        found, expected = ([each for run in runs for each in getattr(run, numbers)] for runs in (moved, unmoved))
        # From the second step after a move on, it is the optimizer's restored state that counts.
        assert found == pytest.approx(expected[: sum(steps)], rel=0 if move.carried else FP32, abs=0), numbers


@pytest.mark.parametrize(("layout", "options"), RESUMED)
def test_resuming_at_the_same_layout_gives_the_same_bits(train_along, layout, options):
    (whole,), _ = train_along((layout,), (6,), options)
    (start, rest), _ = train_along((layout, layout), (2, 4), options)
    assert start.losses + rest.losses == whole.losses and start.grad_norms + rest.grad_norms == whole.grad_norms
    assert_same_bits(rest.parameters, whole.parameters)


@slow
def test_a_checkpoint_moves_between_shards_of_other_sizes(train_along, tmp_path):
    """Twenty rows on either of two ranks, then 24 and 16 (even shards are rounded), then twenty again."""
    layout, options = IN_BUCKETS
    (whole,), _ = train_along((layout,), (6,), options)
    ranks, losses, norms = Layout.read(layout).ranks, [], []
    for part, rows in enumerate(("20,20", "even", "20,20")):
        folders = {"load": tmp_path / str(part - 1) if part else None, "save": tmp_path / str(part)}
        until = {"save_interval": 1000, "train_iters": 2 * part + 2, "override_opt_param_scheduler": True}
        arguments = _arguments(Layout.read(layout), **options, **folders, **until, vocab_shards=rows)
        run = train(ranks, arguments, same_weights=not part)
        losses += run.losses
        norms += run.grad_norms
    assert losses == pytest.approx(whole.losses, rel=FP32, abs=0)
    assert norms == pytest.approx(whole.grad_norms, rel=FP32, abs=0)


def refusals(rank, _world_size, cases):
    """What parsing says to each case's arguments, on another rank than the first to some; None if they are accepted."""
    import torch

    import pretrain_gpt_vp as script

    script.prepare()
    from megatron.training.training import destroy_global_state

    said = []
    for arguments in cases[:: 5 if rank else 1]:
        sys.argv = ["pretrain_gpt_vp.py", *arguments]
        try:
            script.parse_and_validate_args()
            destroy_global_state()
            said.append(None)
        except UserError as error:
            said.append(str(error))
        assert not torch.distributed.is_initialized()
    return said


def test_what_is_no_checkpoint_or_does_not_fit_is_refused_before_anything_starts(train_along, tmp_path):
    layout, options = DEFAULT_FORM
    _, good = train_along((layout,), (2,), options)

    def damaged(name):
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name, tmp_path / name / "iter_0000002"

    cut, cut_step = damaged("cut")
    first_file = min(cut_step.glob("*.distcp"))
    first_file.write_bytes(first_file.read_bytes()[:-1000])
    unreadable, step = damaged("unreadable")
    (step / ".metadata").write_bytes(b"no metadata")
    unmarked, step = damaged("without its mark")
    (step / "metadata.json").write_bytes(b"")
    wrong_tracker, _ = damaged("tracker")
    (wrong_tracker / "latest_checkpointed_iteration.txt").write_text("twelve")
    empty_tracker, step = damaged("empty tracker")
    shutil.copytree(unmarked / "iter_0000002", empty_tracker / "iter_0000004")
    (empty_tracker / "latest_checkpointed_iteration.txt").write_text("")
    by_rank = tmp_path / "a file for each rank"
    (by_rank / "iter_0000002" / "mp_rank_00_000").mkdir(parents=True)
    (by_rank / "latest_checkpointed_iteration.txt").write_text("2")
    as_before = {"load": good, **Layout.read(layout).options, **options, "override_opt_param_scheduler": None}
    cases = [
        ({**as_before, "train_iters": 2}, None),
        (
            {**as_before, "no_load_optim": True, "untie_embeddings_and_output_weights": None},
            "an untied output layer",
        ),
        ({"load": good, "no_load_optim": True}, None),
        ({"load": tmp_path / "new", "save": tmp_path / "new", "save_interval": 2}, None),
        ({"load": tmp_path / "no such"}, "contains no checkpoint"),
        ({"load": cut, "save": cut, "save_interval": 2, "no_load_optim": True}, None),
        ({"load": unreadable}, "iter_0000002"),
        ({"load": unmarked}, "iter_0000002"),
        ({"load": wrong_tracker}, f"cannot read {wrong_tracker}"),
        (
            {"load": by_rank, **Layout.read("1f1b/vocab-2 p2").options},
            "which this run cannot load: convert it in a run that has the checkpoint's parallel sizes",
        ),
        ({"load": empty_tracker}, "it contains no number of an iteration"),
        ({"save": first_file / "below", "save_interval": 2}, "is a file; choose another directory"),
        (
            {"load": good, **DISTRIBUTED},
            "vocab_parallel was True in the run that wrote it and is not set in this run: give the old value",
        ),
        (
            {**as_before, "vocab_shards": "30,10", "train_iters": 2},
            "--vocab-shards was even in the run that wrote it and is 30,10 in this run: give the old value, and "
            "save with --dist-ckpt-optim-fully-reshardable",
        ),
    ]
    pretrained = {"pretrained_checkpoint": good}
    tied = {"untie_embeddings_and_output_weights": None}
    fleeting = {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 2, "load": good}
    newer, older = tmp_path / "newer", tmp_path / "older"
    for place, step in ((newer, 4), (older, 1)):
        shutil.copytree(unreadable / "iter_0000002", place / f"iter_{step:07d}")
        (place / "latest_checkpointed_iteration.txt").write_text(str(step))
    cases += [
        (pretrained, None),
        ({**pretrained, "load": tmp_path / "new", "save": tmp_path / "new", "save_interval": 2}, None),
        ({**pretrained, **tied, "load": tmp_path / "new"}, "an untied output layer"),
        ({"pretrained_checkpoint": tmp_path / "no such"}, "--pretrained-checkpoint"),
        ({**as_before, **fleeting, "train_iters": 2}, None),
        ({**as_before, **fleeting, "train_iters": 2, "non_persistent_global_ckpt_dir": older}, None),
        ({**as_before, **fleeting, "non_persistent_global_ckpt_dir": newer}, f"cannot read {newer}/iter_0000004"),
    ]
    laid_out = {**DISTRIBUTED, "pipeline_model_parallel_layout": "Et*4|t*2|t*2|t*4L"}
    _, in_a_v = train_along(("v-half/vocab-2 p2",), (2,), laid_out)
    interleaved = {**Layout.read("1f1b/vocab-2 p2").options, **laid_out, "pipeline_schedule": "interleaved"}
    cases += [
        (
            {"load": in_a_v, **interleaved},
            "the placement of chunks was ((0, 3), (1, 2)) in the run that wrote it and is ((0, 2), (1, 3)) in this run",
        ),
        (
            {"save": tmp_path / "a", "save_interval": 2, "async_save": True, "use_persistent_ckpt_worker": True},
            "with --async-strategy mcore",
        ),
    ]
    before = _contents(cut)
    overridden = {"override_opt_param_scheduler": True}  # where the case is not about it
    arguments = [_arguments(Layout.read("plain"), **overridden | changes) for changes, _ in cases]
    said, other = run_ranks(2, refusals, arguments)
    assert said[::5] == other and _contents(cut) == before
    for (changes, expected), found in zip(cases, said, strict=True):
        assert (found is None) == (expected is None) and (expected or "") in (found or ""), (changes, found)
        assert "\n" not in (found or "")


DAMAGE = {
    "a file that is cut off": ({"use_distributed_optimizer": True}, "the read step failed on rank 0"),
    "another optimizer": ({}, "has no optimizer.state"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_load_that_fails_is_a_line_on_each_rank(train_along, tmp_path, fault):
    layout, options = DEFAULT_FORM
    _, good = train_along((layout,), (2,), options)
    folder = shutil.copytree(good, tmp_path / "copy")
    changes, said = DAMAGE[fault]
    if changes:
        file = min(folder.glob("iter_*/*.distcp"))
        file.write_bytes(file.read_bytes()[:-1000])
    here = {**Layout.read(layout).options, **changes, "load": folder, "train_iters": 2}
    ends = run_ranks_to_their_end(2, train_with_fault, _arguments(Layout.read("plain"), **here))
    assert all(status in (1, 2) and len(errors(text)) == 1 and "Traceback" not in text for status, text in ends), ends
    assert said in ends[0][1]


def test_another_length_is_refused_in_one_line(train_along):
    layout, options = DEFAULT_FORM
    _, good = train_along((layout,), (2,), options)
    here = {**Layout.read(layout).options, **options, "load": good, "train_iters": 4}
    said = refusal(run_ranks_to_their_end(2, train_with_fault, _arguments(Layout.read("plain"), **here)))
    assert "total number of weight decay iterations do not match" in said


def _contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
