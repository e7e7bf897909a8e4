"""Replay a rank on a CUDA device that does nothing (`null_device.c`), to test the host's work and its allocations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_vp.schedule import PassCosts, generate, to_json
from tests.harness.ranks import ROOT

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).with_name("null_device.c")
JOB = [
    *("configs/gpt_4b.yaml", "--seq-length", "1024", "--max-position-embeddings", "1024", "--vocab-size", "65536"),
    *("--global-batch-size", "24", "--core-attention", "sdpa", "--iterations", "1"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables that put the device under a process."""
    folder = tmp_path_factory.mktemp("null_device")
    packages = Path(torch.__file__).parents[1]
    headers = [*packages.glob("nvidia/cu*/include"), packages / "triton/backends/nvidia/include"]
    if shutil.which("gcc") is None or torch.version.cuda is None or torch.cuda.is_available() or len(headers) < 2:
        pytest.skip("needs a C compiler and a PyTorch that is built for CUDA, on a machine without a GPU")
    includes = [f"-I{each}" for each in headers]
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", *includes, "-Wl,-soname,libcuda.so.1", str(SOURCE), "-ldl"]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "MEGATRON_VP_CPU")}
    return kept | {
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # there is no cuDNN on this device
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


REPLAY = """
from megatron_vp.cli.app import main
from megatron_vp.vocab.kernels.fused import FusedOperations

def sort_on_host(self, order_n, counts, tokens_n, spans, vocab_size):
    on_host = [each.cpu() for each in (order_n, counts, tokens_n, spans)]
    super(FusedOperations, self).sort_by_owner_(*on_host, vocab_size)
    for on_device, found in zip((order_n, counts), on_host):
        on_device.copy_(found)

FusedOperations.sort_by_owner_ = sort_on_host
main()
"""
"""How many tokens a rank owns is what a kernel counts, and sizes depend on it. Copies do run on this device."""


def _replay(folder, environment, *flags):
    """The report, and what the device says at the end."""
    report = folder / "report.json"
    program = ["-c", REPLAY] if "LD_PRELOAD" in environment else ["-m", "megatron_vp.cli.app"]
    command = [sys.executable, *program, "replay", *JOB, "-o", str(report), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text()), done.stderr


CASES = [
    ("the first rank, vocab-2", ["--rank", "0", "--vocab-parallel"]),
    ("a middle rank, vocab-1, B and W apart", ["--rank", "3", "--vocab-parallel", "--pipeline-schedule", "zb-h1"]),
    ("Megatron's last rank", ["--rank", "7"]),
    ("both vocabulary layers on a rank", ["--rank", "0", "--pipeline-schedule", "v-half"]),
]


@pytest.mark.parametrize("flags", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_the_allocator_holds_what_is_counted_of_shapes_and_nothing_is_compiled(tmp_path, environment, flags):
    found, _ = _replay(tmp_path, environment, *flags)
    counted, _ = _replay(tmp_path, os.environ | {"PYTHONPATH": environment["PYTHONPATH"]}, *flags, "--shapes-only")
    for name in ("parameters", "gradients"):
        assert found["memory_bytes"][name] == counted["memory_bytes"][name]
    for name in ("allocated", "peak"):
        assert found["memory_bytes"][name] == pytest.approx(counted["memory_bytes"][name], rel=0.02)
    assert found["memory_bytes"]["reserved"] >= found["memory_bytes"]["peak"]
    assert 0 < found["memory_bytes"]["outside"] < 2**30
    # Whatever PyTorch compiles leaves its source there.
    assert not list(Path(environment["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py"))


def test_chunks_in_the_hosts_memory_leave_the_allocator_as_they_leave_the_count(tmp_path, environment):
    """A pass needs a little more on a device than its shapes say, and rank 0 owns what mock tokens there are; what
    leaves is the same."""
    on_device, counted = {}, {}
    for chunks in (0, 2, 4):
        path = tmp_path / "po.json"
        costs = PassCosts(other={"copy": 0.75})
        path.write_text(to_json(generate("po", 8, 24, vocab="vocab-2", chunks=4, costs=costs, offload_chunks=chunks)))
        flags = ["--rank", "0", "--vocab-parallel", "--pipeline-schedule", str(path)]
        on_device[chunks] = _replay(tmp_path, environment, *flags)[0]["memory_bytes"]["peak"]
        variables = os.environ | {"PYTHONPATH": environment["PYTHONPATH"]}
        counted[chunks] = _replay(tmp_path, variables, *flags, "--shapes-only")[0]["memory_bytes"]["peak"]
        assert on_device[chunks] == pytest.approx(counted[chunks], rel=0.02)
    for chunks in (2, 4):
        assert on_device[0] - on_device[chunks] == pytest.approx(counted[0] - counted[chunks], rel=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
@pytest.mark.parametrize("waits", ["timers of level 2", "CUDA_LAUNCH_BLOCKING=1"])
def test_whole_iterations_whose_host_waits(tmp_path, environment, waits, schedule):
    flags, variables = ["--timing-log-level", "2"], {}
    if waits == "CUDA_LAUNCH_BLOCKING=1":
        flags, variables = [], {"CUDA_LAUNCH_BLOCKING": "1"}
    job = ["--rank", "0", "--vocab-parallel", "--pipeline-schedule", schedule, "--iterations", "2", *flags]
    found, said = _replay(tmp_path, environment | variables, *job)
    assert found["memory_bytes"]["peak"] > found["memory_bytes"]["allocated"] > 0
    launches, _, _, waited = map(
        int, re.search(r"null device: (\d+) \D+ (\d+) \D+ (\d+) \D+ (\d+) waits", said).groups()
    )
    chunks = 2 if schedule == "v-half" else 1
    # 24 microbatches; timers start and stop around F, B of each chunk.
    assert waited > (launches / 2 if variables else 2 * 24 * 4 * chunks)


WAITING = """
import re
import sys
import torch
from tests.gpu import test_one_device
from tests.harness.ranks import RankError

if __name__ == "__main__":
    schedule, method, receives = sys.argv[1:]
    test_one_device.TIMEOUT = 150
    case = ("cuda", torch.float32, 2, schedule, method)
    try:
        early = receives == "early"
        found = test_one_device._run(*case, early_receives=early, limit=10 if early else 40)
    except RankError as error:
        stuck = re.search(test_one_device.STUCK, str(error))
        sys.exit("hangs" if stuck else str(error))
    print(len(found), "ranks")
"""


@pytest.mark.parametrize(
    ("schedule", "method", "receives", "status", "said"),
    [
        ("zb-h1", "vocab-2", "late", 0, "2 ranks"),
        ("v-half", "vocab-2", "late", 0, "2 ranks"),
        ("1f1b", "vocab-1", "early", 1, "hangs"),
    ],
)
def test_ranks_that_share_it_wait_for_every_message_where_it_is_posted(
    tmp_path, environment, schedule, method, receives, status, said
):
    """The streams of `staged` on a device whose streams hold up the host, as with CUDA_LAUNCH_BLOCKING=1."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    command = [sys.executable, str(script), schedule, method, receives]
    # No kernel writes a number: what is counted has to be zero from the start, and not what a tensor left behind.
    fresh = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=fresh, capture_output=True, text=True, timeout=200)
    assert (done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]) == (status, said), done.stderr


PACKED = """
import sys
from types import SimpleNamespace
from unittest import mock
import torch
import pretrain_gpt_vp as script

args = dict(sft=False, dataloader_inter_document_masking=True, create_attention_mask_in_dataloader=False)
args |= dict(context_parallel_size=1, pipeline_model_parallel_size=2, seq_length=16)
mpu = mock.Mock(**{
    "get_tensor_model_parallel_rank.return_value": 0,
    "get_tensor_model_parallel_world_size.return_value": 1,
    "is_pipeline_first_stage.return_value": sys.argv[1] == "first",
    "is_pipeline_last_stage.return_value": sys.argv[1] == "last",
})
whole = torch.arange(32).view(2, 16)
sample = dict(tokens=whole, labels=whole + 1, loss_mask=torch.ones(2, 16), position_ids=whole)
sample |= dict(cu_seqlens=torch.tensor([[0, 5, 16, 16], [0, 3, 12, 16]], dtype=torch.int32))
sample |= dict(max_seqlen=torch.tensor([11, 9]))
torch.cuda.init()
with (
    mock.patch.multiple(script, get_args=lambda: SimpleNamespace(**args), mpu=mpu,
                        is_first_or_last_pipeline_stage=lambda _: sys.argv[1] != "middle",
                        predicts_further_tokens=lambda _: False, get_batch_on_this_cp_rank=lambda batch, **_: batch),
    mock.patch.object(torch.distributed, "broadcast"),
):
    torch.cuda.set_sync_debug_mode("error")  # every call that makes the host wait raises
    batch = script.get_batch(iter([sample]), None, 2)
    packed = script.packed_parameters(*batch[5:])
    torch.cuda.set_sync_debug_mode("default")
assert all(each is None or each.is_cuda for each in batch[:7])
read = [name for name, each in zip(("first", "last"), batch) if each is not None]  # tokens, labels
assert read == [each for each in sys.argv[1:] if each != "middle"]
print(packed.max_seqlen_q, packed.cu_seqlens_q.tolist())
"""


@pytest.mark.parametrize("stage", ["first", "middle", "last"])
def test_packed_sequences_do_not_make_the_host_wait(tmp_path, environment, stage):
    """Else the host no longer runs ahead of its device, on every rank and in every F."""
    (tmp_path / "packed.py").write_text(PACKED)
    command = [sys.executable, str(tmp_path / "packed.py"), stage]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().splitlines()[-1] == "11 [0, 5, 16, 19, 28, 32]"


def test_the_probe_of_calls_that_wait_reports_every_call(tmp_path, environment):
    """What cannot work on this device, NCCL alone, is said in its line and keeps no other call from being watched."""
    rows = tmp_path / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "waits.py"), "--output", str(rows)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert found[-1]["call"] == "synchronize, which must wait"
    assert len(found) >= 19
    assert all(row["error"] is None for row in found if not row["call"].startswith("NCCL"))


def test_the_probe_of_copies_beside_passes_runs(tmp_path, environment):
    """Its own sizes are too large for a machine without a device; figures of this one mean nothing."""
    rows = tmp_path / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "overlap_tax.py"), "--output", str(rows)]
    command += ["--tokens", "256", "--hidden", "256", "--layers", "1", "--copy-mib", "4"]
    one_queue = environment | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_queue, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["kind"] for row in found} == {"copy", "held", "to-host", "from-host"}
    assert any("behind_ms" in row for row in found) and {row["hardware_queues"] for row in found} == {"1"}
    assert "runs no kernel" in done.stdout
