"""Test searches over parallel sizes with offload: which sizes are tried with it, and what it gains."""

import pytest

from megatron_vp.cost.hardware.gpus import GIB
from megatron_vp.cost.planning import search
from megatron_vp.cost.planning.variants import variants
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
    kept = [(each.variant, each.candidate) for each in offloaded.found]
    assert len({*kept}) == len(kept)
    best = offloaded.frontier
    for each in plain.frontier:
        assert any(one.iteration_seconds <= each.iteration_seconds and one.fits(each.peak_memory) for one in best)
    away = [each for each in best if each.candidate.plan.offload_chunks]
    assert min(each.peak_memory for each in away) < 0.95 * min(each.peak_memory for each in plain.frontier)
    assert all(rank.load <= 0.91 for each in away for rank in each.copies)
