"""Test the costs of offloading: the bandwidth to host memory, the bytes copied per rank, and copies in a prediction."""

import json
from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.cost.planning import offloading
from megatron_vp.cost.planning.offloading import fullest_node
from megatron_vp.errors import UserError
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import Pass, PassCosts, Simulator, generate
from tests.cost.small_job import run

H200 = HARDWARE["h200"]
MODEL = ModelShape(layers=32, hidden=4096, heads=32, ffn=16384, vocab=32000)
# A sequence so long that none of its tensors is too small to leave.
JOB = Job(MODEL, sequence=8192, micro_batch=1, microbatches=32, pipeline=8, layers=LayerKind.ENGINE)


ONE_RANK = generate("interleaved", 1, 2, chunks=2)


@pytest.mark.parametrize(
    ("order", "free", "shared"),
    [
        # The copies out end at 4 and 7: O0 waits from 3 on. With one queue F0.1 waits for the first of them, from 2 on.
        ("F0 F1 F0.1 O0 B0.1 F1.1 O1 B1.1 R0 B0 R1 B1", 19, 20),
        ("F0 O0 F1 O1 F0.1 B0.1 F1.1 B1.1 R0 B0 R1 B1", 24, 24),
    ],
)
def test_a_rank_waits_for_its_copies(order, free, shared):
    steps = tuple(map(Pass.parse, order.split()))
    costs = PassCosts(F=2, B=2, W=2, other={"copy": 6})  # F takes 1, B 2, a copy 3.
    for one_queue, makespan in ((False, free), (True, shared)):
        found = Simulator(replace(ONE_RANK, ranks=(steps,)), costs, one_queue).simulate(costs)
        assert found.makespan == makespan


def test_a_node_holds_the_activations_of_its_own_ranks():
    host = [5.0, 4.0, 3.0, 2.0]
    job = replace(JOB, pipeline=4)
    assert fullest_node(job, H200, host) == 14
    assert fullest_node(replace(job, data=3), H200, host) == 5 * 3 + 4 * 3 + 3 * 2
    assert fullest_node(replace(job, data=16), H200, host) == 40


WIDE = ["--hidden-size", 16384, "--num-attention-heads", 128, "--vocab-parallel", "--hardware", "h200"]
WIDE += ["--pipeline-schedule", "po", "--num-virtual-stages-per-pipeline-rank", 2]
"""So wide that copies hide behind the passes."""


def test_the_command_says_what_copies_take(small):
    words = [small, *WIDE]
    plain, moved = (
        json.loads(run("simulate", *words, "--offload-chunks", chunks, "--format", "json").stdout)["plan"]
        for chunks in ("0", "half")
    )
    assert (plain["offload_chunks"], moved["offload_chunks"]) == (0, 1)
    assert "copies" not in plain
    assert moved["peak_memory_bytes"] < plain["peak_memory_bytes"]
    assert moved["iteration_seconds"] < 1.02 * plain["iteration_seconds"]
    assert len(moved["copies"]) == 4 and moved["copies"][0]["host"] > 0
    assert sum(moved["seconds"].values()) == pytest.approx(moved["iteration_seconds"])
    text = run("simulate", *words, "--offload-chunks", 1).stdout
    assert "host memory for offloaded activations on the fullest node" in text and "copies take" in text


def test_too_little_host_memory_is_refused(small, monkeypatch):
    words = [small, *WIDE, "--offload-chunks", 2]
    found = json.loads(run("simulate", *words, "--format", "json").stdout)["plan"]["copies"]
    monkeypatch.setattr(offloading, "host_room", lambda hardware: 0.7 * sum(each["host"] for each in found))
    refused = run("simulate", *words).exception
    assert isinstance(refused, UserError) and "of host memory per node, but activations may use only" in str(refused)
