"""Test the jobs of published runs, and the stated errors of their predictions."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from evidence import DATA, public
from evidence.comparison import errors_by_group, predicted
from evidence.public_rows import read_rows
from megatron_vp.cost.hardware.constants import compared
from megatron_vp.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ROWS = {row["id"]: row for row in read_rows()}


def test_a_run_becomes_megatrons_options():
    row = next(row for row in ROWS.values() if row["model"] == "llama31_405b" and row["gpus"] == "96")
    flags = row.flags()
    following = dict(pairwise(flags))
    assert following["--tensor-model-parallel-size"] == "8"
    assert following["--num-virtual-stages-per-pipeline-rank"] == "7"
    assert {"--swiglu", "--bf16", "--sequence-parallel", "--use-distributed-optimizer"} <= {*flags}
    assert "--num-experts" not in flags
    assert "--recompute-modules" not in flags
    assert "--use-precision-aware-optimizer" not in flags
    assert ROWS["dgxc-048"].flags()[-7:-2] == [
        *("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
    ]
    flags = ROWS["moe-zoo-102"].flags()
    start = flags.index("--recompute-modules")
    assert flags[start : start + 3] == ["--recompute-modules", "layernorm", "moe"]


def few():
    return [row for row in ROWS.values() if row["model"] in ("llama2_13b", "gpt_zb_1.5b")]


def test_errors_are_counted_by_group_and_refused_runs_are_named():
    outcomes = [*map(predicted, few())]
    groups = {each.group: each for each in errors_by_group(outcomes)}
    assert {*groups} == {"dense_fp8", "dense_bf16_a100", "all"} and groups["all"].runs == len(outcomes)
    errors = [abs(each.tokens_per_second / each.row.tokens_per_second - 1) for each in outcomes]
    assert groups["all"].mean == pytest.approx(sum(errors) / len(errors)) and groups["all"].worst == max(errors)
    row = few()[0]
    refused = predicted(type(row)(dict(row.columns, pp="7"), row.model))
    assert refused.error is None and "16 ranks cannot be divided into replicas of 7 ranks" in refused.refusal
    assert errors_by_group([refused]) == []


def test_the_script_prints_runs_and_groups_of_any_file(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, few()[0].columns)
        writer.writeheader()
        writer.writerows(row.columns for row in few())
    public.main([str(file), "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    assert [run["id"] for run in document["runs"]] == [row["id"] for row in few()]
    assert [group["group"] for group in document["groups"]] == ["dense_bf16_a100", "dense_fp8", "all"]
    public.main([str(file), "--only", "llama2_13b"])
    table = capsys.readouterr().out
    assert "8,715" in table and "gpt_zb" not in table and "predicted to fit" in table
    public.main([str(file), "--format", "csv"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("id,group,judged") and len(lines) == 1 + len(few())


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda text: text.replace(",gpus,", ",gpu_count,"), "column gpus is missing"),
        (lambda text: text.splitlines()[0], "the file has no rows"),
        (lambda text: text.replace("llama2_13b", "llama9"), "the sizes of model 'llama9' are unknown"),
    ],
)
def test_a_file_that_lacks_something_is_refused(tmp_path, change, expected):
    file = tmp_path / "runs.csv"
    file.write_text(change((DATA / "h100.csv").read_text()))
    with pytest.raises(UserError, match=expected):
        read_rows(file)


# The frozen table of jobs keeps the model's numbers as they are; these three tests predict all runs again.
@pytest.fixture(scope="module")
def outcomes():
    return [predicted(row) for row in ROWS.values()]


@pytest.mark.slow
def test_what_predictions_say_of_published_runs_is_what_they_are_off(outcomes):
    groups = {each.group: each for each in errors_by_group(outcomes)}
    kinds = {"dense_bf16": ("h100", False, False), "dense_fp8": ("h100", True, False), "moe": ("h100", True, True)}
    for name, kind in {**kinds, "dense_bf16_a100": ("a100", False, False)}.items():
        said, found = compared(*kind), groups[name]
        assert (said.runs, said.mean, said.worst) == (found.runs, round(100 * found.mean), round(100 * found.worst))


@pytest.mark.slow
def test_at_least_eighty_runs_on_h100_fit_as_they_did(outcomes):
    h100 = [each for each in outcomes if each.row["gpu"] == "h100"]
    assert sum(bool(each.fits) for each in h100) >= 80
    assert not [each.row["id"] for each in h100 if each.row.judged and each.refusal]


@pytest.mark.slow
def test_the_readme_says_how_far_predictions_are_off(outcomes):
    means = {each.group: round(100 * each.mean) for each in errors_by_group(outcomes)}
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    runs = sum(row.judged for row in ROWS.values())
    told = f"Over {runs} published runs, the mean absolute error is {means['all']} %"
    assert f"{told} (for the MoE runs alone, {means['moe']} %)" in re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", said)
