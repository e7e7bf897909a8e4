"""Test searches over parallel sizes with offload: which sizes are tried with it, and what it gains."""

import json

import pytest
import yaml

from megatron_vp.cost.hardware.gpus import GIB
from megatron_vp.cost.planning import search
from megatron_vp.cost.planning.offloading import SIZES
from megatron_vp.cost.planning.variants import variants
from tests.cost.small_job import run
from tests.cost.test_plan_offload import WIDE

MODEL = {
    "num_layers": 8,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "seq_length": 4096,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "global_batch_size": 12,
    "micro_batch_size": 1,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "pipeline_model_parallel_size": 4,
}
KEPT = ("tensor", "context", "micro-batch", "recompute")


@pytest.fixture(scope="module")
def plain_and_offloaded():
    tried = variants(MODEL, 4, WIDE, KEPT)
    return [search.Search(tried, WIDE, 100 * GIB, offload=offload).run() for offload in (False, True)]


def test_offload_adds_smaller_runs_and_changes_no_other(plain_and_offloaded):
    plain, offloaded = plain_and_offloaded
    assert plain.offload_sizes == 0 and offloaded.offload_sizes in range(1, SIZES + 2)
    kept = [(each.variant, each.candidate) for each in offloaded.found]
    assert len({*kept}) == len(kept)
    assert {(each.variant, each.candidate) for each in plain.found} <= {*kept}
    best = offloaded.frontier
    for each in plain.frontier:
        assert any(one.iteration_seconds <= each.iteration_seconds and one.fits(each.peak_memory) for one in best)
    away = [each for each in best if each.candidate.plan.offload_chunks]
    assert min(each.peak_memory for each in away) < 0.95 * min(each.peak_memory for each in plain.frontier)
    assert all(rank.load <= 0.91 for each in away for rank in each.copies)


def test_the_command_says_how_many_runs_were_offloaded(plain_and_offloaded, tmp_path, monkeypatch):
    asked = []

    def found(self):
        asked.append(self.offload)
        return plain_and_offloaded[self.offload]

    monkeypatch.setattr(search.Search, "run", found)
    path = tmp_path / "wide.yaml"
    path.write_text(yaml.safe_dump(MODEL))
    words = [path, "--search", "--nodes", 1, "--hardware", "h200"]
    text = run("plan", *words, "--offload").stdout
    runs = sum(1 for each in plain_and_offloaded[1].found if each.candidate.plan.offload_chunks)
    assert f"parallel sizes, {runs} runs simulated" in text and "offloaded" in text
    document = json.loads(run("plan", *words, "--offload", "--format", "json").stdout)
    assert any(each["offload_chunks"] and "--offload-chunks" in each["flags"] for each in document["frontier"])
    assert "activations to host memory:" not in run("plan", *words).stdout and asked == [True, True, False]
