"""Test that bad input to `megatron-vp plan` and `simulate` gives a one-line error and exit status 2."""

from pathlib import Path

import pytest

from megatron_vp.cli.planning import Request, read_cluster
from megatron_vp.errors import UserError
from tests.cost.small_job import SMALL, run

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "h10"], "h100"),
        (["--pipeline-model-parallel-size", "16"], "8 layers"),
        (["--pipeline-model-parallel-size", "3", "--nodes", "1"], "8 ranks cannot be divided into replicas of 3"),
        (["--nodes", "1", "--global-batch-size", "7"], "--global-batch-size 7 is not a multiple of"),
        (["--num-attention-heads", "15"], "15 attention heads"),
        (
            ["--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size 0 is not a whole number from 1 to 268435456",
        ),
        (["--mtp-num-layers", "-1"], "--mtp-num-layers -1 is not a whole number from 0 to 1024"),
        (["--pipeline-model-parallel-size", "eight"], "invalid int value: 'eight'"),
        (
            ["--pipeline-model-paralel-size", "8"],
            "--pipeline-model-paralel-size is not a known option; the nearest known option is --pipeline-model-",
        ),
        (["--memory", "-1"], "to 512; got -1"),
        (["--memory", "inf"], "to 512; got inf"),
        (["--memory", "nan"], "to 512; got nan"),
        (["--memory", "1e-300"], "to 512; got 1e-300"),
        (["--memory", "80000"], "--memory is in GiB per rank, from 0.01 to 512; got 80000"),
        (["--memory", "40000", "--hardware", "cpu"], "from 0.01 to 16384; got 40000"),
        (["--nodes", "130000"], "--nodes 130000 is too large: give at most 125000"),
        (["--seq-length", "1000000000"], "--seq-length 1000000000 is not a whole number from 1 to 268435456"),
        (["--lr", "nan"], "--lr nan is not a finite number"),
        (["--clip-grad=-inf"], "--clip-grad -inf is not a finite number"),
        (["--global-batch-size", "100000000"], "4 pipeline ranks x 100000000 microbatches are 400,000,000"),
        (["--num-layers=9", "--num-layers-per-virtual-pipeline-stage=2"], "2 does not divide"),
        (["--num-layers-per-virtual-pipeline-stage", "4"], "4 does not divide"),
        (
            ["--vocab-parallel", "--vocab-parallel-algorithm", "vocab-3"],
            "invalid choice: 'vocab-3' (choose from 'vocab-1', 'vocab-2')",
        ),
        (["--pipeline-schedule", "1f1b", "--vocab-parallel", "--num-virtual-stages-per-pipeline-rank=2"], "1f1b"),
        (["8"], "'8' is not a flag"),
        (["--pipeline-schedule", "v-half-ish"], "unknown schedule 'v-half-ish'"),
        (["--pipeline-model-parallel-layout", "Et*4|t*4L"], "does not match 8 layers"),
        (["--config", "nowhere.yaml"], "cannot read configuration file nowhere.yaml"),
        (["--num-layers"], "argument --num-layers: expected one argument"),
        (["--num-layers", "100000000"], "--num-layers 100000000 is not a whole number from 1 to 10000"),
        (["--vocab-size", "1" + 30 * "0"], "is not a whole number from 1 to 268435456"),
        (["--vocab-parallel", "maybe"], "--vocab-parallel takes fewer values: leave out maybe"),
        (["--pipeline-schedule", ""], "unknown schedule ''"),
        (["--pipeline-schedule", "interlaced"], "add --vocab-parallel"),
        (["--hardwrae", "h200"], "--hardwrae is not a known option; the nearest known option is --hardware"),
        (["--node=4"], "--node is not a known option; the nearest known option is --nodes"),
        (["--tp", "8"], "--tp is not a known option; the nearest known option is --tensor-model-parallel-size"),
        (["--data-parallel-size", "8"], "--data-parallel-size is not a known option"),
        (["--vocab-parallel-algorithm", "vocab-1"], "has no effect without --vocab-parallel"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--train-iters", "1e3"], "argument --train-iters: invalid int value: '1e3'"),
        (["--optimizer", "adm"], "argument --optimizer: invalid choice: 'adm' (choose from 'adam', 'sgd',"),
        (["--bf16", "no"], "--bf16 takes fewer values: leave out no"),
        (["--lr", "1", "2"], "--lr takes fewer values: leave out 2"),
        (["--lr"], "argument --lr: expected one argument"),
        (["--data-path", "x", "-f", "json"], "--data-path takes fewer values: leave out -f json"),
        (["--recompute-granularity", "ful"], "invalid choice: 'ful' (choose from 'full', 'selective')"),
    ],
)
def test_bad_input_is_one_line(small, arguments, words):
    error = run("simulate", small, *arguments).exception
    assert isinstance(error, UserError), error
    assert words in str(error) and "\n" not in str(error)


def test_a_memory_limit_takes_the_unit_of_the_activation_limit(small):
    with_unit, without = (run("simulate", small, "--memory", size, "--format", "json") for size in ("40GiB", "40"))
    assert with_unit.exit_code == 0 and with_unit.stdout == without.stdout


def test_a_batch_that_simulate_cannot_play_is_refused_at_once_with_its_chunks(small, monkeypatch):
    monkeypatch.setattr("megatron_vp.cost.planning.predict.make_simulator", None)
    flags = ["--num-virtual-stages-per-pipeline-rank", "2", "--global-batch-size", str(131_072 // 8 + 1)]
    error = run("simulate", small, *flags).exception
    assert isinstance(error, UserError) and "16385 microbatches x 2 chunks are 131,080 forward passes" in str(error)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fp16: 1", "'fp16' in section 'more' is a switch: write true or false, not 1"),
        ("lr: [1, 2]", "'lr' in section 'more': the number of values must be 1, not 2"),
        ("lr: true", "'lr' in section 'more' cannot be True; strings such as"),
        ("optimizer: addam", "'optimizer' in section 'more': invalid choice: 'addam' (choose from 'adam', 'sgd'"),
        ("learning_rate: 1", "'learning_rate' in section 'more' is not a known argument; the nearest known argument"),
    ],
)
def test_a_value_that_training_does_not_take_is_refused(small, line, words):
    small.write_text(SMALL + f"more:\n  {line}\n")
    error = run("simulate", small).exception
    assert isinstance(error, UserError) and words in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("section", ["[8, 1024]", "8", "8 layers", "[]"])
def test_a_section_of_the_wrong_type_is_one_line(small, tmp_path, section):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"model: {section}\n")
    for files in ([small, "--config", overlay], [overlay, "--config", small]):
        error = run("plan", *files).exception
        assert isinstance(error, UserError) and "\n" not in str(error)
        assert "'model' in the top level is not a known argument" in str(error)


def test_a_section_that_is_a_list_is_one_line(small):
    small.write_text(SMALL + "optimizer:\n  - lr: 1\n")
    for command in ("plan", "simulate"):
        error = run(command, small).exception
        assert isinstance(error, UserError) and "section 'optimizer' is a list" in str(error)
        assert "\n" not in str(error)


def test_a_plan_for_more_stages_than_layers_is_one_line(small):
    error = run("plan", small, "--pipeline-model-parallel-size", "16").exception
    assert isinstance(error, UserError) and "\n" not in str(error)
    assert str(error).startswith("no schedule can run this job: 8 layers cannot fill 16 virtual stages")


def test_chunks_that_the_layers_cannot_fill_are_named_beside_the_plans(small):
    table = run("plan", small, "--num-layers", "6").stdout
    assert "not possible: v-half, vocab-2: 6 layers cannot fill 8 virtual stages" in table
    assert "use: --vocab-parallel" in table


def test_a_plan_that_nothing_fits_is_one_line(small):
    found = run("plan", small, "--memory", "2")
    error = found.exception
    # A slow machine also says how far it is.
    assert isinstance(error, UserError) and all(line.startswith("predicting: ") for line in found.stderr.splitlines())
    assert str(error).startswith("no plan fits into 2 GiB per rank: the smallest, ") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("was", "line", "words"),
    [
        (
            "num_layers: 8",
            "num_layer: 8",
            "'num_layer' in section 'model' is not a known argument; the nearest known argument is 'num_layers'",
        ),
        ("num_layers: 8", "num_layers: true", "'num_layers' in section 'model' cannot be True"),
        ("num_layers: 8", "num_layers: 8\n  num_layers: 9", "found duplicate key num_layers"),
        ("  num_layers: 8", "\tnum_layers: 8", "is not valid YAML"),
    ],
    ids=["misspelt", "switch", "twice", "tab"],
)
def test_a_bad_line_in_the_configuration_is_named_with_its_file(small, was, line, words):
    small.write_text(SMALL.replace(was, line, 1))
    error = run("plan", small).exception
    assert isinstance(error, UserError) and str(error).startswith(str(small)) and words in str(error)
    assert "\n" not in str(error)


def test_an_incomplete_configuration_names_what_is_missing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  num_layers: 8\n")
    error = run("simulate", path).exception
    assert isinstance(error, UserError) and "hidden_size" in str(error)


@pytest.mark.parametrize(
    ("hardware", "flags", "said"),
    [
        ("h100", [], "15 published runs of this kind (H100, dense, bf16"),
        ("h100", ["--fp8-format", "hybrid"], "31 published runs of this kind (H100, dense, fp8"),
        ("b200", [], "No published run of this kind"),
    ],
)
def test_an_answer_says_which_public_runs_stand_behind_it(hardware, flags, said):
    asked = Request.of(*read_cluster([CONFIGS / "llama3_8b.yaml"], flags, hardware, None, None))
    assert said in asked.caveat and said in asked.document()["note"]
