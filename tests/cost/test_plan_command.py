"""Test `megatron-vp plan` and `simulate`: configurations, flags that override them, formats, errors for bad input."""

import json
import os
import re
import shlex
from dataclasses import replace

import pytest

from megatron_vp.cli.planning import Request, read_cluster
from megatron_vp.cost.hardware.gpus import find_hardware
from megatron_vp.cost.layers.job_plan import plan_of, settings_of
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.planning.candidates import candidates
from megatron_vp.cost.planning.predict import evaluate
from megatron_vp.cost.planning.search import Search
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_sizes, yaml_of
from megatron_vp.jobs.layout_text import layers_in, layout_of
from megatron_vp.jobs.virtual_stages import ENDS
from megatron_vp.schedule import VocabMethod
from tests.cost.small_job import CONFIGS, run

pytestmark = pytest.mark.usefixtures("search_once")


def test_the_configuration_gives_the_job_and_flags_win(small):
    config = read_sizes([small], [])
    job = job_of(config)
    assert (job.pipeline, job.data, job.microbatches, job.model.layers) == (4, 1, 8, 8)
    assert job.model.vocab == 100096  # Megatron pads to multiples of 128
    assert (job.model.ffn, job.model.tied, job.model.dropout, job.element_bytes) == (4096, False, True, 2)
    flags = shlex.split("--pipeline-model-parallel-size 2 --num-layers=16 --swiglu --hidden-dropout 0.0 --lr 1e-4")
    job = job_of(read_sizes([small], flags), 8)
    assert (job.pipeline, job.data, job.microbatches, job.model.layers) == (2, 4, 2, 16)
    assert job.model.gated and job.model.ffn == 2688


def test_overlays_and_flags_say_how_the_pipeline_runs(small, tmp_path):
    def planned(*flags):
        return plan_of(read_sizes([small], flags))

    assert planned() == planned("--num-virtual-stages-per-pipeline-rank", "1")
    assert planned("--vocab-parallel").vocab is VocabMethod.VOCAB_2
    assert planned("--vocab-parallel", "--vocab-parallel-algorithm", "vocab-1").vocab is VocabMethod.VOCAB_1
    assert planned("--vocab-parallel", "--pipeline-schedule", "interlaced").vocab is VocabMethod.INTERLACED
    assert (planned("--num-virtual-stages-per-pipeline-rank=2").schedule, planned().schedule) == ("interleaved", "1f1b")
    assert planned("--num-layers-per-virtual-pipeline-stage", "1").chunks == 2
    overlays = [small, CONFIGS / "methods" / "v-half.yaml", CONFIGS / "methods" / "vocab-1.yaml"]
    plan = plan_of(read_sizes(overlays, []))
    assert (plan.schedule, plan.vocab) == ("v-half", VocabMethod.VOCAB_1)
    longer = tmp_path / "longer.yaml"
    longer.write_text("model:\n  num_layers: 16\n")
    assert job_of(read_sizes([small, longer], [])).model.layers == 16


@pytest.mark.parametrize("layers", [7, 9, 11])
def test_uneven_layers_of_a_v_are_simulated_as_training_lays_them_out(small, layers):
    from megatron_vp.mcore.model.chunk_layout import even_layout

    flags = ["--num-layers", str(layers), "--pipeline-schedule", "v-half", "--vocab-parallel", "--vocab-shards", "even"]
    found = json.loads(run("simulate", small, *flags, "--format", "json").stdout)["plan"]
    assert tuple(found["layers"]) == layers_in(even_layout(layers, 8, 0)) and sum(found["layers"]) == layers


def test_a_post_training_loop_keeps_fp32_logits_only_where_the_vocabulary_is_whole(small):
    def simulated(*flags):
        return json.loads(run("simulate", small, *flags, "--format", "json").stdout)["plan"]

    plain, logits = simulated(), simulated("--post-training")
    held = [[rank["vocabulary"] for rank in each["memory_bytes"]] for each in (plain, logits)]
    assert held[0][:3] == held[1][:3] and held[0][3] < held[1][3] <= 2 * held[0][3]
    assert logits["iteration_seconds"] > plain["iteration_seconds"] > 1.5 * logits["forward_only_seconds"]
    split = "--vocab-parallel", "--vocab-parallel-algorithm", "vocab-2"
    expected, found = simulated(*split), simulated(*split, "--post-training")
    assert 2 * found.pop("forward_only_seconds") < expected["iteration_seconds"] and found == expected


def test_simulate_takes_the_shards_that_training_takes(small, tmp_path):
    split = ["--num-layers", 10, "--vocab-parallel"]

    def simulated(*flags):
        return json.loads(run("simulate", small, *split, *flags, "--format", "json").stdout)["plan"]

    even, assigned = (
        simulated("--vocab-shards", "even", "--pipeline-model-parallel-layout", "Et*2|t*3|t*2|t*3L"),
        simulated(),
    )
    assert assigned["iteration_seconds"] < even["iteration_seconds"] / 1.01
    assert simulated("--vocab-shards", "balanced") == assigned and sum(assigned["layers"]) == 10
    assert len(set(even["vocab_rows"])) == 1 < len(set(zip(assigned["layers"], assigned["vocab_rows"], strict=True)))
    rows = ",".join(map(str, assigned["vocab_rows"]))
    same = simulated("--vocab-shards", rows, "--pipeline-model-parallel-layout", layout_of(assigned["layers"]))
    assert same == assigned
    table = run("simulate", small, *split).stdout
    assert f"vocabulary rows by rank: {rows}; layers by stage: {','.join(map(str, assigned['layers']))}" in table
    given = simulated("--pipeline-model-parallel-layout", "Et|t*4|t*4|tL")
    assert given["layers"] == [1, 4, 4, 1] and given["vocab_rows"][1:3] == [0, 0]


def test_layouts_read_back():
    assert layers_in("Et*5|(t*5|)*5t*6|t*6L") == (5, 5, 5, 5, 5, 5, 6, 6)
    assert layers_in("E|tt|t*3|L") == (0, 2, 3, 0)
    assert layers_in(layout_of((0, 2, 3, 0))) == (0, 2, 3, 0)
    with pytest.raises(UserError, match="cannot be parsed"):
        layers_in("E5|L")
    for endless in ("Et*999999999|L", "E(((t)*999|)*999)*999L", "Et*" + "9" * 5000):
        with pytest.raises(UserError, match="more than 10000 letters"):
            layers_in(endless)


def test_what_the_cost_model_does_not_know_is_named_beside_its_answer(small):
    assert "not counted" not in run("simulate", small).stdout
    harmless = ["--optimizer", "adam", "--mtp-num-layers", "0", "--attention-backend", "flash"]
    answer = run("simulate", small, *harmless, "--moe-latent-size", 8, "--use-kitchen-attention").stdout.splitlines()
    uncounted = "not counted"
    assert f"{uncounted}: --use-kitchen-attention, --moe-latent-size" in answer
    others = ["--attention-backend", "unfused", "--recompute-granularity", "selective"]
    assert f"{uncounted}: --attention-backend" in run("simulate", small, *others).stdout.splitlines()
    answer = run("simulate", small, *others, "--recompute-modules", "mlp", "mhc").stdout.splitlines()
    assert f"{uncounted}: --attention-backend, --recompute-granularity selective (mhc)" in answer
    answer = run("simulate", small, *others[2:], "--recompute-modules", "mlp").stdout
    assert "not counted" not in answer and answer != run("simulate", small).stdout


def test_what_a_job_leaves_open_is_said(small):
    sixteen = (
        "--nodes 2 --num-experts 16 --expert-model-parallel-size 16 --seq-length 4096 --global-batch-size 16 --bf16"
    )
    words = [*sixteen.split(), "--pipeline-model-parallel-size", "1", "--fp8-format", "hybrid"]
    document = json.loads(run("simulate", small, *words, "--format", "json").stdout)
    attention, experts = document["assumed"]
    assert "times of FlashAttention 2 and cuDNN 9" in attention and "--moe-token-dispatcher-type is flex" in experts
    assert f"assumed: {attention}; {experts}" in run("simulate", small, *words).stdout
    words += ["--attention-backend", "fused", "--moe-token-dispatcher-type", "alltoall", "--format", "json"]
    assert json.loads(run("simulate", small, *words).stdout)["assumed"] == []
    near = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--nodes", "1", "--format", "json"]
    (alone,) = json.loads(run("simulate", small, *near).stdout)["assumed"]
    assert "--moe-token-dispatcher-type is alltoall" in alone


def test_simulate_shows_every_rank(small, tmp_path):
    table = run("simulate", small, "--vocab-parallel").stdout
    assert "vocab-2; vocabulary rows by rank: " in table and "Predicted, not measured" in table
    found = json.loads(run("simulate", small, "--vocab-parallel", "--format", "json").stdout)["plan"]
    passes = found["iteration_seconds"] - found["seconds"]["step"]
    idle = [f"{100 * (1 - busy / passes):.1f}" for busy in found["busy_seconds"]]
    rows = [[cell.strip() for cell in line.split("│")] for line in table.splitlines() if line.startswith("│")]
    assert [row[3] for row in rows[:4]] == idle
    assert "fits into 79.1 GiB" in table
    assert "does not fit into 0.5 GiB; bound by memory" in run("simulate", small, "--memory", "0.5").stdout
    document = json.loads(run("simulate", small, "--pipeline-schedule", "v-half", "--format", "json").stdout)
    found = document["plan"]
    assert (document["gpus"], found["schedule"], found["method"]) == (4, "v-half", "plain")
    assert sum(found["seconds"].values()) == pytest.approx(found["iteration_seconds"])
    assert len(found["busy_seconds"]) == len(found["memory_bytes"]) == 4


def test_plan_ranks_and_its_flags_simulate_to_what_it_promised(small):
    document = json.loads(run("plan", small, "--nodes", "1", "--hardware", "a100", "--format", "json").stdout)
    plans = document["plans"]
    chosen, verdict = plans[document["best"]], document["verdict"]
    fastest = min(e["iteration_seconds"] for e in plans if e["fits"] and e["method"] != "interlaced")
    assert chosen["fits"] and chosen["iteration_seconds"] <= 1.01 * fastest
    own = [e for e in plans if e["method"] in ("plain", "redistributed") and e["schedule"] in ("1f1b", "interleaved")]
    assert verdict["rival"] == min(own, key=lambda e: e["iteration_seconds"]) and verdict["ours"] == chosen
    assert verdict["answer"] == "faster"
    assert verdict["speedup"] == verdict["rival"]["iteration_seconds"] / chosen["iteration_seconds"]
    saved = verdict["rival"]["peak_memory_bytes"] - chosen["peak_memory_bytes"]
    assert verdict["memory_saved_gib"] == saved / 2**30
    contract = {"schedule", "method", "layers", "vocab_rows", "offload_chunks"}
    assert all(contract | {"iteration_seconds", "peak_memory_bytes", "fits"} <= set(each) for each in plans)
    for each in plans:
        split = each["method"] not in ("plain", "redistributed")
        assert (sum(each["vocab_rows"]) == 100096) if split else each["vocab_rows"] is None
        assert each["offload_chunks"] == 0
    again = run(
        "simulate", small, "--nodes", 1, "--hardware", "a100", "--format", "json", *shlex.split(chosen["flags"])
    )
    promised = json.loads(again.stdout)["plan"]
    assert promised["iteration_seconds"] == pytest.approx(chosen["iteration_seconds"])
    moved = next(e for e in plans if (e["schedule"], e["method"]) == ("1f1b", "redistributed"))
    assert "pipeline_model_parallel_layout" in moved["settings"]


def test_what_plan_prints_for_uneven_chunks_reads_back_as_the_same_plan(small, tmp_path):
    flags = ["--num-layers", "20"]
    job = job_of(read_sizes([small], flags))
    for schedule, vocab in (
        ("interleaved", VocabMethod.NONE),
        ("interleaved", VocabMethod.VOCAB_1),
        ("v-half", "none"),
    ):
        found = candidates(job, find_hardware("h100"))
        wanted = next(e for e in found if (e.schedule, e.vocab) == (schedule, vocab))
        assert len(wanted.layers) == 8
        overlay = tmp_path / "overlay.yaml"
        settings = settings_of(read_sizes([small], flags), wanted, job)
        assert "num_virtual_stages_per_pipeline_rank" not in settings  # Megatron counts those of the layout
        overlay.write_text(yaml_of(settings))
        assert plan_of(read_sizes([small, overlay], flags)) == wanted


def test_layers_that_options_shift_are_read_and_give_way_to_another_layout(small, tmp_path):
    shifted, overlay = tmp_path / "shifted.yaml", tmp_path / "overlay.yaml"
    shifted.write_text("model: {num_layers: 6}\nparallelism: {" + ", ".join(f"{name}: true" for name in ENDS) + "}\n")
    config = read_sizes([small, shifted], [])
    job, own = job_of(config), plan_of(config)
    assert own == Plan("1f1b", layers=(1, 2, 2, 1)) and settings_of(config, own, job) == {}
    answer = run("simulate", small, "--config", shifted).stdout
    assert "s per iteration" in answer and "--account" not in answer
    plans = [replace(own, layers=(2, 1, 1, 2)), Plan("v-half", layers=(1, 1, 1, 0, 0, 1, 1, 1))]
    for wanted in plans:
        overlay.write_text(yaml_of(settings_of(config, wanted, job)))
        assert plan_of(read_sizes([small, shifted, overlay], [])) == wanted
    heads = read_sizes([small, shifted], ["--mtp-num-layers", "1"])
    layout = settings_of(heads, plans[0], job_of(heads))["pipeline_model_parallel_layout"]
    assert layout == "Et*2|t*1|t*1|t*2mL"


def test_plan_answers_first(small):
    lines = run("plan", small, "--hardware", "a100").stdout.splitlines()
    assert re.match(
        r"faster: 1\.\d\d times as fast as the best run without megatron_vp \(.*\), with .* memory$", lines[0]
    )
    assert lines[1].startswith("use: --vocab-parallel ")
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith("│")]
    best = json.loads(run("plan", small, "--hardware", "a100", "--format", "json").stdout)
    best = best["plans"][best["best"]]
    assert (rows[0][1], rows[1][2]) == (best["schedule"], "plain *")
    assert any(line.startswith("the slowest of 4 GPUs counts as ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pipeline-model-parallel-size", 1], "not worth it: with one pipeline stage, there are no ranks to share"),
        (
            ["--pipeline-model-parallel-size", 2, "--vocab-size", 128],
            "not worth it: the best run with megatron_vp (",
        ),
    ],
)
def test_what_is_not_worth_it_is_not_recommended(small, flags, said):
    text = run("plan", small, *flags).stdout
    assert text.startswith(said) and "--vocab-parallel" not in text and "--pipeline-schedule" not in text
    document = json.loads(run("plan", small, *flags, "--format", "json").stdout)
    verdict, best = document["verdict"], document["plans"][document["best"]]
    assert verdict["answer"] == "not worth it" and verdict["rival"] == best and verdict["speedup"] < 1.01


def test_the_job_as_given_is_a_rival(small):
    """Also with a layout that no rule of ours finds, and MTP on a stage of its own."""
    job = [small, "--num-layers", 5, "--mtp-num-layers", 1, "--vocab-size", 1024]
    words = [*job, "--pipeline-model-parallel-layout", "Ettt|tt|m|L", "--format", "json"]
    own = json.loads(run("simulate", *words).stdout)["plan"]
    document = json.loads(run("plan", *words).stdout)
    given = document["plans"][document["given"]]
    assert given["iteration_seconds"] == pytest.approx(own["iteration_seconds"]) and given["flags"] == ""
    assert document["verdict"]["rival"]["iteration_seconds"] <= given["iteration_seconds"]
    for each in document["plans"]:  # The settings describe the run that was predicted.
        if each["method"] in ("plain", "redistributed") and each["schedule"] == "1f1b":
            again = json.loads(run("simulate", *words, *shlex.split(each["flags"])).stdout)["plan"]
            assert again["iteration_seconds"] == pytest.approx(each["iteration_seconds"])


def test_a_given_layout_is_also_tried_with_the_flag(small):
    words = [small, "--num-layers", 8, "--pipeline-model-parallel-layout", "Et|t*4|tt|tL", "--format", "json"]
    flagged = json.loads(run("simulate", *words, "--vocab-parallel").stdout)["plan"]
    plans = json.loads(run("plan", *words).stdout)["plans"]
    (found,) = [each for each in plans if each["layers"] == [1, 4, 2, 1] and each["method"].startswith("vocab-2")]
    assert found["iteration_seconds"] == pytest.approx(flagged["iteration_seconds"])
    assert "--pipeline-model-parallel-layout" not in found["flags"]


def test_nothing_is_recommended_that_our_options_refuse():
    job = [CONFIGS / "gpt_4b.yaml", "--pipeline-model-parallel-size", 2, "--global-batch-size", 8]
    document = json.loads(run("plan", *job, "--fp32-residual-connection", "--format", "json").stdout)
    chosen = document["plans"][document["best"]]
    assert chosen["method"] in ("plain", "redistributed") and chosen["schedule"] in ("1f1b", "interleaved")
    reasons = [each["reason"] for each in document["impossible"]]
    assert reasons and all("--fp32-residual-connection is not supported" in reason for reason in reasons)


def test_a_variable_that_the_start_needs_is_said_and_refuses_nothing(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    job = [CONFIGS / "gpt_4b.yaml", "--pipeline-model-parallel-size", 2, "--global-batch-size", 8]
    table = run("plan", *job, "--tensor-model-parallel-size", 2).stdout
    assert "training would refuse" not in table and "not possible: 1f1b" not in table
    used = table.index("\nuse: ")
    assert (
        table.index("\nand set the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron requires") > used
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in run("plan", *job).stdout
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_progress_goes_into_a_pipe_too(small, monkeypatch):
    monkeypatch.setattr("megatron_vp.cli.result_output.LINE_EVERY", 1e9)
    silent = run("plan", small)
    monkeypatch.setattr("megatron_vp.cli.result_output.LINE_EVERY", 0.0)
    monkeypatch.setattr(Search, "run", Search.run.__wrapped__)
    said = run("plan", small)
    assert said.stdout == silent.stdout and "predicting" not in silent.stderr
    shares = [int(line.split()[1]) for line in said.stderr.splitlines() if line.startswith("predicting: ")]
    assert len(shares) > 3 and shares == sorted(shares) and shares[-1] == 100


@pytest.fixture
def evaluations(small, monkeypatch):
    """Three made-up evaluations of any `plan`, the fastest first; its arguments are noted in `asked`."""
    job = job_of(read_sizes([small], []))
    gpu = find_hardware("h100")
    one = evaluate(Plan(), job, gpu)
    full = [replace(rank, activations=1e12) for rank in one.memory]
    made = [
        replace(one, iteration_seconds=1.0, memory=full),
        replace(one, iteration_seconds=2.0, plan=Plan(vocab=VocabMethod.VOCAB_1)),
        replace(one, iteration_seconds=3.0, plan=Plan("zb-h1")),
    ]
    asked = []

    def run(self):
        asked.append(self)
        self.found[:] = sorted(made, key=lambda each: each.iteration_seconds)
        return self

    monkeypatch.setattr(Search, "run", run)
    return made, asked


def test_plan_chooses_among_what_fits_and_lists_it_first(small, evaluations):
    lines = run("plan", small, "--num-virtual-stages-per-pipeline-rank", "4").stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("1f1b", "vocab-1", "2.000"),
        ("zb-h1", "plain", "3.000"),
        ("1f1b", "plain", "1.000"),
    ]
    assert rows[-1][-1] == "memory" and lines[0].startswith("smaller: ")
    assert "which does not fit into 79.1 GiB" in lines[0]
    assert evaluations[1][0].chunks == 4
    document = json.loads(run("plan", small, "--format", "json").stdout)
    assert document["best"] == 1 and [each["fits"] for each in document["plans"]] == [False, True, True]


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_suffix_of_a_file_says_the_format(small, tmp_path, monkeypatch, evaluations, command):
    for suffix, start in (
        ("json", b"{"),
        ("JSON", b"{"),
        ("txt", b"smaller: " if command == "plan" else b"4 x NVIDIA"),
    ):
        file = tmp_path / f"answer.{suffix}"
        assert run(command, small, "-o", file).exit_code == 0
        assert file.read_bytes().startswith(start)
    monkeypatch.setattr(f"megatron_vp.cli.{command}.read_cluster", None)
    for words, said in (
        (["--format", "table", "-o", "x.json"], "--format table and -o x.json contradict each other"),
        (["-o", "x.svg"], "cannot write x.svg: this command writes table, json"),
        (["-o", "x.pdf"], "cannot write x.pdf: this command writes table, json"),
    ):
        error = run(command, small, *words).exception
        assert isinstance(error, UserError) and said in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pipeline-model-parallel-size", "16"], "8 layers"),
        (["--nodes", "1", "--global-batch-size", "7"], "--global-batch-size 7 is not a multiple of"),
        (["--mtp-num-layers", "-1"], "--mtp-num-layers -1 is not a whole number from 0 to 1024"),
        (["--memory", "-1"], "to 512; got -1"),
        (["--memory", "80000"], "--memory is in GiB per rank, from 0.01 to 512; got 80000"),
        (["--memory", "40000", "--hardware", "cpu"], "from 0.01 to 16384; got 40000"),
        (["--seq-length", "1000000000"], "--seq-length 1000000000 is not a whole number from 1 to 268435456"),
        (["--clip-grad=-inf"], "--clip-grad -inf is not a finite number"),
        (["--global-batch-size", "100000000"], "4 pipeline ranks x 100000000 microbatches are 400,000,000"),
        (["--num-layers=9", "--num-layers-per-virtual-pipeline-stage=2"], "2 does not divide"),
        (["--num-layers-per-virtual-pipeline-stage", "4"], "4 does not divide"),
        (["--pipeline-schedule", "1f1b", "--vocab-parallel", "--num-virtual-stages-per-pipeline-rank=2"], "1f1b"),
        (["--pipeline-schedule", "v-half-ish"], "unknown schedule 'v-half-ish'"),
        (["--num-layers", "100000000"], "--num-layers 100000000 is not a whole number from 1 to 10000"),
        (["--vocab-parallel", "--moe-paged-stash", "--moe-expert-rank-capacity-factor=2"], "--moe-paged-stash"),
        (["--vocab-parallel", "maybe"], "'maybe' is not a flag or a flag's value"),
        (["--data-parallel-size", "8"], "unrecognized arguments: --data-parallel-size"),
        (["--train-iters", "1e3"], "argument --train-iters: invalid int value: '1e3'"),
        (["--optimizer", "adm"], "argument --optimizer: invalid choice: 'adm' (choose from 'adam', 'sgd',"),
        (["--data-path", "x", "-f", "json"], "'-f' is not a flag or a flag's value"),
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


def test_chunks_that_the_layers_cannot_fill_are_named_beside_the_plans(small):
    table = run("plan", small, "--num-layers", "6").stdout
    (line,) = [one for one in table.splitlines() if one.startswith("not possible: 6 layers cannot fill 8 virtual")]
    assert "(interleaved, zb-v, v-half, v-min" in line


def test_a_plan_that_nothing_fits_is_one_line(small):
    found = run("plan", small, "--memory", "2")
    error = found.exception
    # A slow machine also says how far it is.
    assert isinstance(error, UserError) and all(line.startswith("predicting: ") for line in found.stderr.splitlines())
    assert str(error).startswith("no plan fits into 2 GiB per rank: the smallest, ") and "\n" not in str(error)


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
