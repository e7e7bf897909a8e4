"""Test that a run chooses its software by the modules that can be imported, not by the names of packages."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megatron_vp.cli.app import main
from megatron_vp.errors import UserError
from megatron_vp.mcore import patch_table, patches
from megatron_vp.mcore.platform import environment, flags, installed
from megatron_vp.mcore.platform.installed import Installed
from tests.harness.ranks import ROOT

APEX = {"apex": True}
ENGINE = {"engine": "2.17.1"}
LOCAL = ["--transformer-impl", "local"]
COMPILED = ["--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"]
SOFTMAX, NORM, ROPE = "--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-rope-fusion"

# (what is installed, the flags that are given, the flags that are added on a GPU)
TABLE = [
    ({**ENGINE, **APEX}, [], []),
    (ENGINE, [], []),
    ({**ENGINE, **APEX}, LOCAL, COMPILED),
    (ENGINE, LOCAL, [SOFTMAX, *COMPILED, NORM]),
    ({**ENGINE, **APEX}, [*LOCAL, "--normalization", "RMSNorm"], [*COMPILED, NORM]),
    (APEX, [], [*LOCAL, *COMPILED, ROPE]),
    ({}, [], [*LOCAL, SOFTMAX, *COMPILED, ROPE, NORM]),
]


@pytest.mark.parametrize(("machine", "given", "added"), TABLE)
def test_flags_follow_the_layers_and_what_is_installed(monkeypatch, machine, given, added):
    monkeypatch.setattr(installed, "here", lambda: Installed(**machine))
    assert flags.platform_arguments(given, cpu=False) == added
    on_cpu = flags.platform_arguments([], cpu=True)
    everything = [*LOCAL, SOFTMAX, *COMPILED, ROPE, "--no-gradient-accumulation-fusion", NORM]
    assert on_cpu == ["--distributed-backend", "gloo", *everything]


def test_layers_that_are_not_installed_are_refused(monkeypatch):
    monkeypatch.setattr(installed, "here", lambda: Installed(**APEX))
    with pytest.raises(UserError, match="cannot work without Transformer Engine: use --transformer-impl local"):
        flags.platform_arguments(["--transformer-impl", "transformer_engine"], cpu=False)


def _folder(tmp_path, **modules: str) -> str:
    for name, text in modules.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    return str(tmp_path)


@pytest.fixture
def separately(monkeypatch):
    """What is hidden and imported inside a test is forgotten after it; what Megatron may use besides is not there."""
    monkeypatch.setattr(installed, "_hidden", {})
    with mock.patch.dict(sys.modules, dict.fromkeys(("einops", "emerging_optimizers", "nvidia_resiliency_ext"))):
        yield
    importlib.invalidate_caches()


MESSAGE = "Found empty `transformer-engine` meta package installed. Install it with framework extensions."
EMPTY = f"__version__ = '2.20.2'\nraise RuntimeError({MESSAGE!r})"


def test_a_transformer_engine_that_cannot_be_imported_is_found_and_named(tmp_path, monkeypatch, separately):
    monkeypatch.syspath_prepend(_folder(tmp_path, transformer_engine=EMPTY))
    fault = "Found empty `transformer-engine` meta package installed"
    assert installed.here() == Installed(engine_fault=fault)
    with pytest.raises(UserError, match=r"cannot be imported: Found empty .* --transformer-impl local"):
        flags.platform_arguments([], cpu=False)
    assert flags.platform_arguments(LOCAL, cpu=False) == [SOFTMAX, *COMPILED, ROPE, NORM]
    assert environment._found("Transformer Engine") == f"broken: {fault}"
    assert installed.here() == Installed(engine_fault=fault), "hidden, and still known to be broken"


def test_a_cpu_run_finds_neither(tmp_path, monkeypatch, separately):
    """Megatron would compute norms and optimizer steps with their kernels, which need a GPU."""
    monkeypatch.syspath_prepend(_folder(tmp_path, transformer_engine="", apex="", amp_C=""))
    installed.hide_what_needs_a_gpu()
    for name in ("transformer_engine", "apex", "amp_C"):
        with pytest.raises(ImportError):
            importlib.import_module(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_product_stands_in_for_apexs(dtype):
    from megatron.core.tensor_parallel import layers

    rows, gradient = torch.randn(3, 2, 5, dtype=dtype), torch.randn(3, 2, 4, dtype=dtype)
    main_grad = torch.ones(4, 5)
    expected = 1 + gradient.flatten(0, 1).double().t() @ rows.flatten(0, 1).double()
    assert not hasattr(layers, "fused_weight_gradient_mlp_cuda") and not layers._grad_accum_fusion_available
    with ExitStack() as put_back:
        put_back.callback(patches.undo, patches.apply(patch_table.patches_of("no fused accumulation")))
        assert layers._grad_accum_fusion_available
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows, gradient, main_grad)
    assert not hasattr(layers, "fused_weight_gradient_mlp_cuda")
    torch.testing.assert_close(main_grad.double(), expected, rtol=1e-6 if dtype == torch.float32 else 2e-2, atol=1e-2)


CONFIGS = ("configs/gpt_4b.yaml", "configs/llama3_8b.yaml")


@pytest.fixture
def answered(capsys, monkeypatch):
    def answer(*words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        with pytest.raises(SystemExit) as end:
            main(["check", *words, "--config", "configs/data/mock.yaml", "--ranks", "8"])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    monkeypatch.chdir(ROOT)
    return answer


EXPERTS = ("--num-experts", "4", "--moe-grouped-gemm", "--disable-bias-linear")
GROWING = ("--config", "tests/mcore/configs/no_batch.yaml", "--step-batch-size-schedule", "0:8 800:16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--async-save", "--use-persistent-ckpt-worker"), "the package nvidia-resiliency-ext is not installed"),
        (
            (
                "--use-distributed-optimizer",
                "--num-distributed-optimizer-instances=2",
                "--pipeline-model-parallel-size=4",
            ),
            "einops, which is not installed",
        ),
        (("--optimizer", "muon"), "emerging-optimizers, which is not installed"),
    ],
    ids=str,
)
def test_a_package_that_an_option_needs_is_missed_here_and_expected_on_other_nodes(
    answered, separately, tmp_path, words, said
):
    job = (CONFIGS[0], f"--save={tmp_path}", f"--load={tmp_path}", *words)
    status, printed, errors = answered(*job, "--nodes", "te=no")
    assert status == 0 and printed.startswith("ok: 8 ranks = "), errors
    status, printed, errors = answered(*job, "--cpu")
    assert (status, printed) == (2, "") and said in errors


@pytest.mark.parametrize(
    ("words", "good", "bad", "said"),
    [
        (EXPERTS, "te=2.17.1,cc=8.0", "te=2.17.1,cc=7.0", "compute capability"),
        ((), "cc=9.0", "cc=ninety", "cc=ninety cannot be parsed: use te="),
    ],
    ids=str,
)
def test_a_node_is_described_by_what_options_need(answered, tmp_path, words, good, bad, said):
    job = (CONFIGS[0], f"--save={tmp_path}", f"--load={tmp_path}", *words)
    status, printed, errors = answered(*job, "--nodes", good)
    assert status == 0, errors
    assert printed.startswith("ok: 8 ranks = ")
    status, printed, errors = answered(*job, "--nodes", bad)
    assert (status, printed) == (2, "") and said in errors


def test_a_job_of_somebodys_own_script_is_judged(answered, tmp_path):
    saving = (f"--save={tmp_path}", f"--load={tmp_path}")
    words = (CONFIGS[0], *saving, "--stride", "3", "--fast", "--log-straggler")
    status, printed, errors = answered(*words, "--script", "own.py")
    assert status == 0, errors
    assert printed.startswith("ok: ") and printed.endswith(
        "options not checked, because only own.py knows them: --stride, --fast\n"
    )
    assert "unrecognized arguments: --stride 3 --fast" in answered(*words)[2]
    refused = answered(*words, "--vocab-parallel", "--script", "own.py")
    assert refused[0] == 2 and "--vocab-parallel with --log-straggler is not supported" in refused[2]


@pytest.mark.parametrize(
    ("config", "nodes", "given", "who"),
    [
        (CONFIGS[0], "te=2.17.1,apex=no", [], ["te", "te", "te", "te", "te"]),
        (CONFIGS[1], "te=no,apex=yes", [], ["local", "apex", "apex", "apex", "apex"]),
        (CONFIGS[0], "te=no,apex=no", [], ["local", "torch", "torch", "megatron_vp", "torch"]),
        (CONFIGS[1], "te=2.17.1,apex=yes", LOCAL, ["local", "apex", "apex", "apex", "te"]),
    ],
)
def test_a_login_node_answers_for_other_nodes(answered, config, nodes, given, who):
    status, printed, errors = answered(config, "--vocab-parallel", *given, "--nodes", nodes, "--format", "json")
    assert status == 0, errors
    found = json.loads(printed)
    if config == CONFIGS[1]:  # RMSNorm, which Apex does not have
        who = [who[0], who[1].replace("apex", "torch"), *who[2:]]
    assert list(found["parts"].values()) == who
    machine = installed.from_text(nodes)
    normalization = [] if config == CONFIGS[0] else ["--normalization", "RMSNorm"]
    with mock.patch.object(installed, "of_nodes", machine):
        assert found["flags"] == flags.platform_arguments([*given, *normalization], cpu=False)


def test_an_answer_for_other_nodes_says_what_it_assumes(answered):
    status, printed, _ = answered(CONFIGS[0], "--nodes", "te=no")
    assert status == 0 and "GPU nodes instead of this machine, assuming compute capability 9.0" in printed


THERE = "te=2.17.1,apex=no"
OURS, V_HALF = ["--vocab-parallel"], ["--vocab-parallel", "--pipeline-schedule", "v-half"]
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe"]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
LAYOUT = ["--pipeline-model-parallel-layout", "Et|" + "tt|" * 14 + "tttL"]
UNEVEN = ["--pipeline-schedule", "v-half", "--untie-embeddings-and-output-weights", *RECOMPUTED, *LAYOUT]


@pytest.mark.parametrize(
    ("nodes", "given", "line"),
    [
        ("te=no", ["--transformer-impl", "transformer_engine"], "cannot work without Transformer Engine"),
        ("te=2.7.0,apex=yes", ["--pipeline-schedule", "zb-h1"], "needs Transformer Engine 2.8 or newer"),
        ("te=new", [], "--nodes te=new cannot be parsed: use te=2.17.1 or te=no"),
        ("te=no", ["--cpu"], "--nodes describes GPU nodes other than this machine"),
        (THERE, [*V_HALF, "--cuda-graph-impl", "local"], "replaying a CUDA graph of pass B runs no Python"),
        (
            THERE,
            [*OURS, "--cuda-graph-impl", "local", *GROWING],
            "graphs are captured only once, for a fixed number of microbatches",
        ),
        (THERE, ["--mtp-num-layers", "2", "--mtp-use-repeated-layer"], "add --no-gradient-accumulation-fusion"),
        (THERE, [*OURS, *FP8, "custom"], "--fp8-recipe custom is not supported"),
        ("te=2.16.0", [*UNEVEN, *FP8, "delayed"], "chunks have different numbers of layers"),
    ],
)
def test_what_could_not_start_there_is_refused_in_a_line(answered, nodes, given, line):
    status, printed, errors = answered(CONFIGS[0], *given, "--nodes", nodes, "--format", "json")
    assert status == 2 and not printed and line in errors and errors.count("\n") == 1
