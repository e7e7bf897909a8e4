"""Test training with offloaded activations: bit for bit the same as without offload, and equal to plain Megatron."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest

from megatron_vp.schedule import family, generate, to_json
from megatron_vp.schedule.request import chunks_to_offload
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, comparable_model, train, train_case
from tests.mcore.case_parts import BOTH, MOE, SEQUENCE, TIED
from tests.mcore.comparison import assert_equal

EVALUATED = {"eval_interval": 2, "eval_iters": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": "core_attn"}
TWO_CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2}
SPLIT = {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-2"}
OTHER = {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-1"}


def case(schedule, size, microbatches, chunks, *options, ranks=None, slow=True):
    merged = {name: value for each in options for name, value in each.items()}
    values = (schedule, size, microbatches, chunks, tuple(sorted(merged.items())), ranks or size)
    name = f"{schedule}-{size}-{microbatches}-{chunks}-{len(options)}-{'-'.join(merged)}"
    return pytest.param(*values, marks=pytest.mark.slow if slow else (), id=name)


CASES = [
    case("1f1b", 2, 5, "all", SPLIT, TIED, EVALUATED, slow=False),
    case("po", 3, 4, "half", OTHER, TWO_CHUNKS, slow=False),
    case("v-min", 3, 1, "all", SPLIT),
    case("interleaved", 2, 3, "all", SPLIT, TWO_CHUNKS, EVALUATED),
    case("gis", 2, 4, "all", TWO_CHUNKS),
    case("gis-h", 4, 4, "half", SPLIT, TWO_CHUNKS),
    case("zb-h1", 3, 6, "all", SPLIT, TIED, EVALUATED),
    case("dualpipe-v", 2, 5, "half", SPLIT),
    case("v-half", 2, 4, "all", OTHER, TIED, SEQUENCE, ranks=4),
    case("po", 2, 6, "all", SPLIT, TWO_CHUNKS, BOTH, TIED, ranks=4),
    case("zb-v", 2, 4, "half", SPLIT, MOE, SELECTIVE),
]


def _arguments(microbatches, size, ranks, **changes):
    options = {"num_layers": 2 * size, "train_iters": 3, "micro_batch_size": 2} | changes
    parts = int(options.get("tensor_model_parallel_size", 1))
    return comparable_model(**options, global_batch_size=2 * microbatches * ranks // size // parts)


@cache
def _ours(schedule, size, microbatches, chunks, options, ranks) -> Run:
    changes = dict(options) | {"pipeline_model_parallel_size": size, "pipeline_schedule": schedule}
    return train(ranks, _arguments(microbatches, size, ranks, offload_chunks=chunks, **changes))


def _files(folder, name, size, microbatches, chunks, options):
    """Files with a schedule that offloads chunks, and with the same one without passes O and R."""
    own = family(name).chunks_of(2 if family(name).chunks is None else None)
    method = options.get("vocab_parallel_algorithm", "none")
    count = chunks_to_offload(chunks, own)
    offloading = generate(name, size, microbatches, vocab=method, chunks=own, offload_chunks=count)
    kept = tuple(tuple(step for step in order if step.kind not in ("O", "R")) for order in offloading.ranks)
    assert offloading.offloaded
    for title, schedule in (("offloading", offloading), ("resident", replace(offloading, ranks=kept))):
        (folder / f"{title}.json").write_text(to_json(schedule))
        yield str(folder / f"{title}.json")


@pytest.mark.parametrize(("schedule", "size", "microbatches", "chunks", "options", "ranks"), CASES)
def test_gradients_are_bit_for_bit_those_without(schedule, size, microbatches, chunks, options, ranks, tmp_path):
    if dict(options).get("untie_embeddings_and_output_weights", True):
        offloaded = _ours(schedule, size, microbatches, chunks, options, ranks)
        resident = _ours(schedule, size, microbatches, "0", options, ranks)
    else:  # T and IB add to one weight: only in one order of the passes is the sum the same digit by digit
        files = _files(tmp_path, schedule, size, microbatches, chunks, dict(options))
        others = tuple(each for each in options if each[0] not in TWO_CHUNKS)  # files have their chunks
        offloaded, resident = (_ours(file, size, microbatches, "0", others, ranks) for file in files)
    for one, other in zip(offloaded.steps, resident.steps, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        assert one.microbatches == other.microbatches
        assert one.gradients.keys() == other.gradients.keys()
        for name, gradient in one.gradients.items():
            assert np.array_equal(gradient, other.gradients[name]), name
    assert offloaded.evaluations == resident.evaluations
    ours = {*SPLIT, *TWO_CHUNKS}
    plain = {name: value for name, value in options if name not in ours}
    assert_equal(offloaded, train(ranks // size, _arguments(microbatches, size, ranks, **plain)), 1e-6)


def count_storages(rank, world_size, arguments):
    """Bytes that forwards saved and that left the device, and those that stayed."""
    from megatron_vp.runtime.offload import SavedForward

    moved, stayed, close = [], [], SavedForward.close

    def counting(self, leaf):
        saved = [*self._by_storage.values()]
        close(self, leaf)
        moved.append(sum(self.sizes))
        staying = (each.bytes for each in saved if each not in self.moving)
        stayed.extend(each.numel() for each in staying if each.untyped_storage().nbytes())

    with mock.patch.object(SavedForward, "close", counting):
        train_case(rank, world_size, arguments)
    return sum(moved), sum(stayed)


def test_what_forwards_save_leaves_the_device():
    arguments = _arguments(
        4, 2, 2, pipeline_model_parallel_size=2, pipeline_schedule="zb-v", offload_chunks="all", **SPLIT
    )
    for moved, stayed in run_ranks(2, count_storages, arguments):
        assert stayed < 0.02 * moved
