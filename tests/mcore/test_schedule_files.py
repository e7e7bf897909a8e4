"""Test schedules from files against plain Megatron: one written by hand, PyTorch's, and a recorded mix."""

import hashlib
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.schedule import PassKind, Placement, family, generate, to_csv, to_json
from megatron_vp.schedule.reorder import forwards
from megatron_vp.schedule.validate import validate
from tests.harness.ranks import run_ranks
from tests.harness.training import _merge, comparable_model, set_weights, tiny_model, train, train_case
from tests.mcore.comparison import assert_equal
from tests.mcore.test_launch import refusals

FOLDER = Path(__file__).parent / "schedules"
BY_HAND = FOLDER / "by_hand.json"
STEPS = 3
BOUND = 1e-6
slow = pytest.mark.slow


def _arguments(microbatches, layers=6, **changes):
    return comparable_model(
        num_layers=layers,
        micro_batch_size=2,
        global_batch_size=2 * microbatches,
        train_iters=STEPS,
        eval_iters=1,
        eval_interval=2,
        untie_embeddings_and_output_weights=True,
        **changes,
    )


@cache
def _plain(microbatches, layers):
    return train(1, _arguments(microbatches, layers))


def _assert_trains_as_plain_megatron(path, layers=6, **changes):
    schedule = family(str(path)).fixed
    sharded = schedule.vocab.is_sharded
    job = {
        "pipeline_model_parallel_size": schedule.pipeline_size,
        "pipeline_schedule": str(path),
        "vocab_parallel": sharded,
        "vocab_parallel_algorithm": str(schedule.vocab) if sharded else None,
    }
    ours = train(schedule.pipeline_size, _arguments(schedule.microbatches, layers, **job, **changes))
    plain = _plain(schedule.microbatches, layers)
    assert len(ours.steps) == STEPS and len(ours.evaluations) == len(plain.evaluations) > 0
    assert_equal(ours, plain, BOUND)


def test_a_schedule_by_hand_that_is_no_family_trains():
    schedule = family(str(BY_HAND)).fixed
    assert schedule.placement.stage_of == ((0, 4), (5, 1), (2, 3))  # the last stage is chunk 0 of rank 1
    assert {PassKind.B, PassKind.W, PassKind.BW} <= schedule.kinds
    validate(schedule)
    _assert_trains_as_plain_megatron(BY_HAND)


@pytest.mark.parametrize(
    "name", ["torch_zbv", *(pytest.param(f"torch_{each}", marks=slow) for each in ("interleaved_1f1b", "dualpipe_v"))]
)
def test_schedules_that_pytorch_wrote_are_proven_and_train(name):
    path = FOLDER / f"{name}.csv"
    validate(family(str(path)).fixed)
    _assert_trains_as_plain_megatron(path, layers=4)


@pytest.mark.parametrize(
    ("name", "vocab", "write"),
    [pytest.param("v-half", "vocab-1", to_json, marks=slow), ("interleaved", "none", to_csv)],
)
def test_a_family_written_to_a_file_trains_from_it(name, vocab, write, tmp_path):
    path = tmp_path / f"own.{'json' if write is to_json else 'csv'}"
    path.write_text(write(generate(name, 2, 3, vocab=vocab)))
    _assert_trains_as_plain_megatron(path, layers=4)


def test_a_file_with_vocabulary_passes_on_some_ranks_trains(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(to_json(generate("v-half", 2, 3, vocab="vocab-2", vocab_ranks=(1,))))
    _assert_trains_as_plain_megatron(path, layers=4, vocab_shards="0,40")


def train_from_own_folder(rank, world_size, arguments, folders, afterwards):
    """What a rank trained, and the schedules that it ran. Its file becomes `afterwards` (None: is removed) when the
    model has been built.
    """
    from megatron_vp.mcore.training import forward_backward

    os.chdir(folders[rank])
    ran, original = [], forward_backward.programs

    def programs(*given, **more):
        ran.append(original(*given, **more)[0])
        return original(*given, **more)

    def set_and_change(model):
        set_weights(model)
        path = Path("schedule.json")
        path.unlink(missing_ok=True)
        if afterwards is not None:
            path.write_text(afterwards)

    with (
        mock.patch.object(forward_backward, "programs", programs),
        mock.patch("tests.harness.training.set_weights", set_and_change),
    ):
        return train_case(rank, world_size, arguments), ran


@pytest.mark.parametrize("afterwards", [None, pytest.param("other", marks=slow)])
def test_all_ranks_run_what_they_read_at_the_start(afterwards, tmp_path):
    files = {"own": generate("1f1b", 2, 4), "other": generate("zb-h1", 2, 4)}
    texts = {name: to_json(schedule) for name, schedule in files.items()} | {None: None}
    folders = [tmp_path / "rank0", tmp_path / "rank1"]
    for folder in folders:
        folder.mkdir()
        (folder / "schedule.json").write_text(texts["own"])
    job = {"pipeline_schedule": "schedule.json", "pipeline_model_parallel_size": 2, "tensorboard_dir": tmp_path}
    results = run_ranks(2, train_from_own_folder, _arguments(4, 4, **job), folders, texts[afterwards])
    for _, ran in results:
        trained = [schedule.ranks for schedule in ran if schedule.microbatches == 4 and PassKind.B in schedule.kinds]
        assert len(trained) == STEPS and set(trained) == {files["own"].ranks}
        assert {PassKind.F} in [schedule.kinds for schedule in ran], "evaluated"
    assert_equal(_merge([run for run, _ in results]), _plain(4, 4), BOUND)
    digest = hashlib.sha256(texts["own"].encode()).hexdigest()
    assert read_job_config([tmp_path / "resolved_config.yaml"], [])["schedule_fingerprint"] == f"sha256:{digest}"


JOB = {"pipeline_model_parallel_size": 4, "vocab_parallel": True, "micro_batch_size": 1, "global_batch_size": 3}
PLAIN = {"vocab_parallel": None, "vocab_shards": None}
REFUSED = [
    (
        {"vocab_parallel_algorithm": "vocab-1"},
        "has the vocabulary passes of vocab-2, but --vocab-parallel-algorithm is vocab-1",
    ),
    ({"global_batch_size": 4}, "has 3 microbatches, but the job has 4"),
    ({"pipeline_model_parallel_size": 2, "global_batch_size": 6}, "has 4 ranks, but --pipeline-model-parallel-size is"),
    ({"pipeline_schedule": "late.json"}, "in every chunk, the weight gradient of microbatch 0 must be computed first"),
    ({"pipeline_schedule": "elsewhere.json"}, "does not place the first stage in chunk 0 of rank 0"),
    ({"pipeline_schedule": "some.json"}, "passes on ranks (1, 3), but vocabulary rows are on ranks (0, 1, 2, 3): use"),
    ({"pipeline_schedule": "forward.json", **PLAIN}, "has no backward passes, so it cannot train"),
    (
        {"step_batch_size_schedule": "0:3 6:6", "global_batch_size": None},
        "has 3 microbatches, but the job has 1, or a growing number",
    ),
]


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    sharded = generate("v-half", 4, 3, vocab="vocab-2")
    other_way_round = [
        tuple(step._replace(microbatch=2 - step.microbatch) for step in order) for order in sharded.ranks
    ]
    turned = replace(sharded, placement=Placement(sharded.placement.stage_of[::-1]), ranks=sharded.ranks[::-1])
    files = {
        "good.json": to_json(sharded),
        "forward.json": to_json(forwards(generate("1f1b", 4, 3), 3)),
        "late.json": to_json(replace(sharded, ranks=tuple(other_way_round))),
        "elsewhere.json": to_json(turned),
        "some.json": to_json(generate("v-half", 4, 3, vocab="vocab-2", vocab_ranks=(1, 3))),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    cases = []
    for changes, _ in REFUSED:
        job = {**JOB, "pipeline_schedule": "good.json", **changes}
        if job["pipeline_schedule"] in files:
            job["pipeline_schedule"] = str(folder / job["pipeline_schedule"])
        cases.append(tiny_model(**job))
    return run_ranks(1, refusals, cases)[0]


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[said for _, said in REFUSED])
def test_a_file_that_does_not_suit_the_job_is_refused_in_one_line(messages, case):
    assert messages[case] is not None and REFUSED[case][1] in messages[case]
    assert "\n" not in messages[case]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON format"),
        ("0F0,0B0\n1F0,1X0", "line 2: '1X0' is not a pass such as 2F0"),
        ("0F0,0B0\n1F0,1B0,2F1", "placement"),
        ("0F0,1B0", "rank 0 has passes of stage 1, but no forward"),
        ("0F0,0SEND_F0,0B0", "compute_only"),
        ("0B0,0F0", "cannot run"),
        ("0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1", "cannot run: rank 0 reads microbatch 1, but rank 1 reads microbatch 0"),
    ],
)
def test_a_damaged_file_is_one_line(text, said, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        family(str(path))
    assert "\n" not in str(error.value)
