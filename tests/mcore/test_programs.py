"""Test that the training function runs the program that `megatron-vp schedule --format programs` shows."""

import pytest

from megatron_vp.mcore.training.forward_backward import programs
from megatron_vp.schedule import FAMILIES, ScheduleRequest, VocabMethod, evaluation, expand_interlaced, generate, lower


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("name", "method"), [("1f1b", "vocab-2"), ("v-half", "vocab-1"), ("interlaced", "vocab-1")])
def test_every_iteration_runs_the_same_programs(name, method, forward_only):
    chunks = 2 if name == "v-half" else 1
    family = FAMILIES[name]
    method = family.method(VocabMethod(method))
    request = ScheduleRequest.of(family, 4, 6, method=method, chunks=chunks, forward_only=forward_only)
    programs.cache_clear()
    schedule, lowered = programs(request, None)
    expected = generate(name, 4, 6, vocab=method)
    expected = evaluation(expected) if forward_only else expected
    assert schedule == expand_interlaced(expected)
    assert lowered == lower(expected)
    assert programs(request, None)[1] is lowered
