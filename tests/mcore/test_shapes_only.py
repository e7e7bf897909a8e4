"""Test `megatron-vp replay --shapes-only`, which counts memory on fake tensors."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.mcore.replay import one_rank
from tests.harness.ranks import run_ranks
from tests.mcore.test_replay import CONFIG, SMALL


def _command(rank, world_size, words):
    done = CliRunner().invoke(app, words)
    return done.stdout, str(done.exception or "")


def _shapes_only(tmp_path, job_rank, flags):
    """What the command prints, its error and its report. A process of its own: caches would keep fake tensors."""
    report = tmp_path / "report.json"
    words = ["replay", CONFIG, "--rank", str(job_rank), "--shapes-only", "--iterations", "1", "-o", str(report)]
    ((said, error),) = run_ranks(1, _command, [*words, *SMALL, "--vocab-size", "500", *flags])
    return said, error, json.loads(report.read_text()) if report.exists() else None


def _all_played(rank, world_size, job_rank, flags):
    """The same replay with as many microbatches as the job has."""
    options = [*SMALL, "--vocab-size", "500", *flags]
    with mock.patch.object(one_rank, "ROUNDS", 1000), contextlib.redirect_stdout(io.StringIO()):
        return one_rank.run_alone("pretrain_gpt_vp.py", [CONFIG], job_rank, None, 1, options, True).memory_bytes


def _with_numbers(rank, world_size, job_rank, flags):
    """The same replay on real tensors, whose storages are counted in the same way."""
    from megatron_vp.mcore.replay.device_kernels import device_kernels
    from megatron_vp.mcore.replay.one_rank import run_alone
    from megatron_vp.mcore.replay.shapes_only import LiveStorages
    from megatron_vp.mcore.settled import process
    from megatron_vp.vocab import operations

    class CountingOperations(operations.ShapeOperations):
        """The eager ones move more than the kernels on a device, which fake tensors stand for. Tokens have owners."""

        sort_by_owner_ = operations.EagerOperations.sort_by_owner_

    class RealStorages(LiveStorages):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return self._counted(function(*args, **(kwargs or {})), torch.Tensor)

    options = [*SMALL, "--vocab-size", "500", "--num-workers", "0", "--rerun-mode", "disabled", *flags]
    with (
        RealStorages() as live,
        mock.patch.object(process, "meter", live),
        mock.patch.object(operations, "_EAGER", CountingOperations()),
        device_kernels(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return run_alone("pretrain_gpt_vp.py", [CONFIG], job_rank, None, 1, options).memory_bytes


@pytest.mark.parametrize(
    ("job_rank", "flags"),
    [
        pytest.param(3, ["--num-layers", "8", "--pipeline-schedule", "v-half"], marks=pytest.mark.slow),
        (1, ["--cpu", "--bf16", "--vocab-parallel", "--vocab-shards", "even", "--core-attention", "sdpa"]),
        pytest.param(3, ["--bf16", "--mtp-num-layers", "1", "--vocab-parallel"], marks=pytest.mark.slow),
    ],
)
def test_as_many_bytes_as_with_numbers(tmp_path, job_rank, flags):
    said, error, found = _shapes_only(tmp_path, job_rank, flags)
    assert not error
    (expected,) = run_ranks(1, _with_numbers, job_rank, flags)
    assert found["pass_milliseconds"] == {} and found["iteration_milliseconds"] is None
    memory = [line.split()[0] for line in said.splitlines()[1:-2]]  # and nothing of Megatron's log
    assert memory == ["parameters", "gradients", "allocated", "peak"]
    found = found["memory_bytes"]
    assert found["peak"] > found["allocated"] > found["parameters"] + found["gradients"]
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_no_more_microbatches_are_played_than_the_peak_needs(tmp_path):
    flags = ["--num-layers", "8", "--pipeline-schedule", "v-half"]
    said, _, found = _shapes_only(tmp_path, 1, [*flags, "--global-batch-size", "64"])
    assert (found["played"], found["microbatches"]) == (12, 32)
    assert said.startswith(
        "pipeline rank 1 of 4, run alone, with 32 microbatches (12 simulated; the others need no additional memory)"
    )
    (all_of_them,) = run_ranks(1, _all_played, 1, [*flags, "--global-batch-size", "64"])
    more = all_of_them["peak"] - found["memory_bytes"]["peak"]
    assert -8 <= more <= 20 * 8 * (4 + 2)  # 20 more microbatches, a count of rows for every rank in each


def _with_a_request(rank, world_size, method, vocabulary):
    from megatron_vp import TokenRequest, token_log_probs
    from megatron_vp.mcore.training.capture import Capture, Probe

    call, finish = Probe.__call__, Capture.finish
    asked = {"output_processor": token_log_probs, "output_processor_context": TokenRequest(0.7, entropy=True)}
    sizes = (
        "--num-layers 4 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 5120 --micro-batch-size 1 --bf16 "
        "--seq-length 8192 --max-position-embeddings 8192 --global-batch-size 8 --pipeline-model-parallel-size 4 "
        "--core-attention sdpa --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    flags = [*sizes.split(), "--vocab-parallel", "--vocab-parallel-algorithm", method, "--vocab-size", str(vocabulary)]
    with (
        mock.patch.object(Probe, "__call__", lambda probe, *args, **kwargs: call(probe, *args, **kwargs, **asked)),
        mock.patch.object(Capture, "finish", lambda captured, output: finish(captured, -output.log_probs)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        return one_rank.run_alone("pretrain_gpt_vp.py", [CONFIG], 3, None, 1, flags, True).memory_bytes


@pytest.mark.slow
def test_log_probabilities_take_a_fraction_of_whole_logits():
    """On the last of 4 ranks, with 152,064 words and 8,192 tokens, where one copy of fp32 logits takes 4.64 GiB."""
    found = [run_ranks(1, _with_a_request, "vocab-1", vocabulary)[0] for vocabulary in (152064, 512)]
    large, small = (memory["peak"] - memory["allocated"] for memory in found)
    assert large - small < 1.5 * 2**30


def test_experts_are_refused_in_one_line(tmp_path):
    _, error, _ = _shapes_only(tmp_path, 3, ["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"])
    assert error.startswith("--shapes-only does not support --num-experts 4") and "\n" not in error


def test_a_shape_that_depends_on_numbers_is_refused():
    from megatron_vp.mcore.replay.shapes_only import fake_tensors

    with fake_tensors():
        numbers = torch.zeros(8)
        with pytest.raises(
            UserError, match=r"--shapes-only cannot determine the shape of the result of aten.masked_select.default"
        ):
            numbers.masked_select(numbers > 0)


def test_a_storage_counts_once_and_until_its_last_user_is_gone():
    from megatron_vp.mcore.replay.shapes_only import fake_tensors
    from megatron_vp.mcore.settled import process

    with fake_tensors():
        live = process.meter
        whole = torch.zeros(1024)
        part = whole[:10]
        assert (live.allocated, live.peak) == (4096, 4096)
        del whole
        assert live.allocated == 4096
        weight = torch.nn.Parameter(torch.zeros(1024))
        squared = weight * weight  # of which the graph keeps nothing but the weight
        hidden = squared.relu()
        del part, squared
        assert live.allocated == 2 * 4096  # weight, result of relu
        del hidden
        assert (live.allocated, live.peak) == (4096, 4 * 4096)
        live.restart()
        assert live.peak == 4096
    assert process.meter is None


def test_what_waits_for_w_keeps_neither_the_chunks_input_nor_its_gradient():
    from megatron_vp.mcore.model.split_backward import _InputGradientLinear, backward_without_weights
    from megatron_vp.mcore.replay.shapes_only import fake_tensors
    from megatron_vp.mcore.settled import process

    with fake_tensors():
        live = process.meter
        weight = torch.nn.Parameter(torch.zeros(16, 64))
        before = live.allocated
        chunk_input = torch.zeros(32, 64).requires_grad_()
        layer_input = chunk_input * 2
        output = _InputGradientLinear.apply(layer_input, None, (weight, None, None))
        del layer_input
        gradient = torch.zeros(32, 16)
        (pending,) = backward_without_weights(partial(output.backward, gradient), [], False)
        assert chunk_input.grad is not None
        del chunk_input, output, gradient
        assert pending.args[1].shape == (32, 64)
        assert live.allocated - before == 4 * 32 * (64 + 16)  # what the product takes, and nothing else
