"""Test the start of a run: refusals, their messages on every rank, and a user's own script with the plug-in."""

import contextlib
import errno
import io
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from megatron_vp.cli.app import main
from megatron_vp.errors import UserError
from megatron_vp.jobs.options import OPTIONS, RUNS
from megatron_vp.mcore.options.refusals import REFUSALS
from megatron_vp.mcore.start import launch
from megatron_vp.mcore.start.preflight import check_job
from tests.harness.ranks import run_ranks
from tests.harness.training import tiny_model

TWO_STAGES = {"pipeline_model_parallel_size": 2}
AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
HYBRID_AHEAD = {"num_layers": None, "hybrid_layer_pattern": "*|-|*|-/*-", "position_embedding_type": "rope"}
VP = {**TWO_STAGES, "vocab_parallel": True}

REFUSED = [
    ({"pipeline_model_parallel_size": 1, "vocab_parallel": True}, "one pipeline stage"),
    (
        {**VP, "pipeline_schedule": "1f1b", "num_layers_per_virtual_pipeline_stage": 1},
        "1f1b needs 1: change",
    ),
    ({"eval_interval": None, "eval_iters": 0}, "a job without --eval-interval"),
    ({**VP, "rank_report": "/dev/null"}, "--rank-report /dev/null cannot be a directory: /dev/null is a file"),
    ({"vocab_size": -3}, "--vocab-size -3 is not a whole number from 1 to"),
    ({"clip_grad": "nan"}, "--clip-grad nan is not a finite number"),
    ({**VP, "context_parallel_size": 2}, "--context-parallel-size 2 and --transformer-impl local"),
    ({**VP, **HYBRID_AHEAD, "pipeline_schedule": "v-half"}, "builds several prediction heads on the last rank"),
    (
        {
            **{**VP, **AHEAD, "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Ett|tt|m|L"},
            "vocab_shards": "256,128,0,128",
        },
        "--vocab-shards without rows for the rank of the MTP layers",
    ),
    ({**VP, "dataloader_inter_document_masking": True}, "needs whole sequences without document boundaries"),
    ({"sft": True}, "--sft cannot work: "),
    ({**VP, "pipeline_schedule": "v-half", "reset_attention_mask": True}, "use --dataloader-inter-document-masking"),
    ({"num_experts": 4, "tensor_model_parallel_size": 2}, "experts fail in their first forward pass; add --sequence"),
    ({**TWO_STAGES, "pipeline_schedule": "interlaced"}, "the schedule has vocabulary passes; add --vocab-parallel"),
    (
        {**TWO_STAGES, "pipeline_schedule": "v-min", "untie_embeddings_and_output_weights": None},
        "v-min with a job without --untie-embeddings-and-output-weights is not supported",
    ),
    ({**TWO_STAGES, "pipeline_schedule": "zigzag"}, "--pipeline-schedule: unknown schedule 'zigzag'"),
    ({**VP, "vocab_parallel_algorithm": "vocab-3"}, "invalid choice: 'vocab-3'"),
    ({**TWO_STAGES, "eval_micro_batch_size": 0}, "modulo by zero"),
    ({**VP, "pipeline_trace": "there", "rank_report": "there"}, "both write rank_N.json"),
    ({**VP, "pipeline_trace_iterations": "5-3"}, "--pipeline-trace-iterations 5-3 is not a range of iterations"),
    ({**TWO_STAGES, "no_such_option": True}, "unrecognized arguments: --no-such-option; the nearest"),
    ({"pipeline_model_parallel_size": 3}, "world size (4) is not divisible by total_model_size"),
    ({**TWO_STAGES, "micro_batch_size": None}, "assert args.micro_batch_size is not None"),
    ({**TWO_STAGES, "distributed_backend": "nccl"}, "--distributed-backend nccl cannot work without a CUDA device"),
    ({**TWO_STAGES, "yaml_cfg": "x.yaml"}, "use --config"),
]


def refusals(_rank, _world_size, cases):
    """The message of each case's refusal, or None where the arguments were accepted."""
    import torch

    import pretrain_gpt_vp as script

    os.environ["WORLD_SIZE"] = "4"
    script.prepare()
    messages = []
    for arguments in cases:
        sys.argv = ["pretrain_gpt_vp.py", *arguments]
        try:
            with launch.as_one_line():
                script.parse_and_validate_args()
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
        assert not torch.distributed.is_initialized()
    return messages


@pytest.fixture(scope="module")
def messages():
    return run_ranks(1, refusals, [tiny_model(**changes) for changes, _ in REFUSED])[0]


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[said for _, said in REFUSED])
def test_what_cannot_work_is_refused_in_one_line(messages, case):
    assert messages[case] is not None and REFUSED[case][1] in messages[case]
    assert "\n" not in messages[case]


def test_a_batch_that_megatron_reduces_is_not_refused():
    batch = {"global_batch_size": 7, "decrease_batch_size_if_needed": True, "eval_global_batch_size": 8}
    assert check_job(["--cpu", *tiny_model(**TWO_STAGES, **batch)], 4).args.global_batch_size == 7


def test_every_refusal_says_what_works_instead():
    refused = [option.message("--it", "") for option in OPTIONS if option.run in RUNS and not option.does]
    for message in (*refused, *REFUSALS.values()):
        assert re.search(r"\b(use|leave|add|set|change|choose|convert|upcycle)\b", message), message


def start(rank, _world_size, arguments, environment):
    """Exit status and standard error of a start of the training job."""
    import pretrain_gpt_vp as script

    os.environ.update(environment)
    for name in [name for name, value in environment.items() if value == ""]:
        del os.environ[name]
    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        script.prepare()
        with script.one_line_errors():
            script.main()
    return stop.value.code, errors.getvalue()


def test_one_rank_says_it_for_all_and_all_exit_with_status_2():
    arguments = tiny_model(pipeline_model_parallel_size=1, vocab_parallel=True)
    (first, text), last = run_ranks(2, start, arguments, {})
    assert first == 2 and last == (2, "") and text.count("\n") == 1
    assert text.startswith("error: --vocab-parallel with one pipeline stage has")


def test_a_start_without_a_launcher_says_how_to_launch():
    ((code, text),) = run_ranks(1, start, tiny_model(), {"RANK": ""})
    assert (
        code == 2
        and text.startswith("error: the environment does not set RANK: ")
        and "torchrun --nproc-per-node" in text
        and text.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "1"}, "no rank has RANK=1, WORLD_SIZE=1: "),
        ({"WORLD_SIZE": "1\x1b[2J\n"}, "WORLD_SIZE=1 [2J: "),
    ],
)
def test_a_place_that_no_launcher_gives_is_refused_before_anything_waits(environment, said):
    ((code, text),) = run_ranks(1, start, tiny_model(), environment)
    assert code == 2 and said in text and text.count("\n") == 1 and len(text) < 300


def test_a_path_that_cannot_be_is_one_line_before_ranks_are_connected(tmp_path):
    paths = {"save": tmp_path / ("x" * 300), "save_interval": 1}
    ((code, text),) = run_ranks(1, start, tiny_model(**paths), {})
    assert code == 2 and "error: File name too long: " in text
    assert text.count("error") == 1 and "Traceback" not in text


def help_text(_rank, _world_size):
    import pretrain_gpt_vp as script

    del os.environ["RANK"]
    sys.argv = ["pretrain_gpt_vp.py", "--help"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as stop:
        script.prepare()
        script.main()
    return stop.value.code, output.getvalue()


def test_help_needs_no_launcher_and_lists_our_options_among_megatrons():
    ((code, text),) = run_ranks(1, help_text)
    assert code == 0
    assert all(option in text for option in ("--vocab-parallel-algorithm {vocab-1,vocab-2}", "--config FILE", "--bf16"))


def resolved(_rank, _world_size, arguments):
    import pretrain_gpt_vp as script

    script.prepare()
    from megatron_vp.mcore.options.arguments import write_resolved_configuration

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    args = script.parse_and_validate_args()
    write_resolved_configuration(args)
    return args.num_layers, args.hidden_size, args.lr, args.transformer_impl, args.pipeline_trace_iterations


def test_the_command_line_wins_over_the_file_and_the_result_is_written_beside_the_checkpoints(tmp_path):
    words = tiny_model(num_layers=None, hidden_size=None, lr=3e-4, config=tmp_path / "run.yaml", save=tmp_path / "out")
    model = {"num_layers": 6, "hidden_size": 48, "pipeline_trace_iterations": "1-2"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": model, "optimizer": {"lr": 9.0}}))
    assert run_ranks(1, resolved, [*words, "--save-interval", "5"]) == [(6, 48, 3e-4, "local", "1-2")]
    written = yaml.safe_load((tmp_path / "out" / "resolved_config.yaml").read_text())
    assert (written["num_layers"], written["lr"], written["pipeline_trace_iterations"]) == (6, 3e-4, "1-2")


def run_own_script(_rank, _world_size, arguments):
    from megatron_vp.mcore.start.launch import run_script

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_script(str(Path(__file__).parent / "own_script.py"), arguments)
    return output.getvalue()


@pytest.mark.parametrize("loss", [{}, pytest.param({"mean_loss": True}, marks=pytest.mark.slow)], ids=str)
def test_somebodys_own_script_trains_unchanged_with_and_without_vocabulary_parallelism(tmp_path, loss):
    (tmp_path / "own.yaml").write_text("data: {stride: 3}")  # an option of the script's own
    case = {"pipeline_model_parallel_size": 3, "num_layers": 3, "train_iters": 8, "lr": 1e-2, "mock_data": None}
    words = tiny_model(**case, **loss, cpu=True, config=tmp_path / "own.yaml")
    outputs = run_ranks(3, run_own_script, words), run_ranks(3, run_own_script, [*words, "--vocab-parallel"])
    plain, split = ([float(loss) for loss in re.findall(r"lm loss: (\S+)", ranks[-1])] for ranks in outputs)
    assert all("building the user's model" in ranks[0] for ranks in outputs)
    assert len(plain) == 8 and plain[-1] < plain[0] - 0.5
    assert split == pytest.approx(plain, rel=1e-5)


def test_the_run_command_passes_everything_after_the_script_on(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_script", lambda script, arguments: started.append((script, arguments)))
    with pytest.raises(SystemExit) as stopped:
        main(["run", "own.py", "--bf16", "--help", "--lr=1", "--", "x"])
    assert stopped.value.code == 0 and started == [("own.py", ["--bf16", "--help", "--lr=1", "--", "x"])]


@pytest.mark.parametrize("error", [EOFError("a file was cut short"), BrokenPipeError(errno.EPIPE, "a peer is gone")])
def test_what_a_script_raises_is_not_passed_over_in_silence(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(launch, "run_script", fail)
    with pytest.raises(type(error), match=str(error.args[-1])):
        main(["run", "own.py"])


def test_a_script_that_is_not_there_is_named():
    ((code, text),) = run_ranks(1, missing_script)
    assert code == 2 and "no_such_script.py is not a file" in text


def missing_script(_rank, _world_size):
    from megatron_vp.mcore.start.launch import run_script

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        run_script("no_such_script.py", [])
    return stop.value.code, errors.getvalue()
