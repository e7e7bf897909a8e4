"""Test the rehearsal before the first iteration: training and evaluation, once for each size of a microbatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_vp.mcore.training.first_iteration import rehearse, saying_host_memory
from megatron_vp.runtime.communicator import Communicator
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.host_memory import HostMemory
from megatron_vp.runtime.model import Shapes
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.rehearsal import RehearsalModel
from megatron_vp.schedule import PassKind, generate, lower

SHAPES = Shapes(8, 1, 4, torch.bfloat16, torch.device("cpu"), mtp_depth=1, mtp_stage=1)
EVALUATED = replace(SHAPES, mtp_depth=0)
"""Evaluation predicts the next token only."""
MICROBATCHES = 3


def programs(microbatches, gradients, shapes):
    """Those of two ranks."""
    schedule = generate("1f1b", 2, microbatches, vocab="vocab-2")
    schedule = schedule if gradients else schedule.forward_only()
    return schedule, lower(schedule, mtp_stage=shapes.mtp_stage if shapes.mtp_depth else None)


class Watched(Pipeline):
    """Rank 1 of two, which notes its iterations in place of running them."""

    def __init__(self):
        lone = Communicator()
        super().__init__(PipelineGroups((0, 1), 1, 1, 0, lone, None, {}, (0, 1), lone))
        self.ran = []

    def run(self, schedule, program, model, layer_shards, shapes, *, gradients, observer=None, rehearsal=False):
        assert isinstance(model, RehearsalModel) and rehearsal and observer is None
        assert schedule.microbatches == MICROBATCHES and layer_shards is None
        assert program == programs(MICROBATCHES, gradients, shapes)[1][1]
        goes_back = any(step.kind in (PassKind.B, PassKind.BW) for step in schedule.ranks[1])
        assert goes_back == gradients == (model.loss(0, torch.zeros(1, 8), None) is not None)
        self.ran.append((shapes, gradients))

    def rehearsed_for(self, shapes, gradients):
        """The iterations that come ahead of one of this kind."""
        self.ran.clear()
        rehearse(self, programs, MICROBATCHES, None, shapes, gradients)
        return list(self.ran)


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.setattr("megatron_vp.runtime.pipeline.pipeline_device", lambda: torch.device("cpu"))
    return Watched()


def test_ahead_of_training_both_kinds_are_rehearsed_and_said(pipeline, capsys):
    assert pipeline.rehearsed_for(SHAPES, True) == [(SHAPES, True), (EVALUATED, False)]
    assert "> rehearsed the pipeline for training and evaluation in " in capsys.readouterr().out


def test_no_kind_is_rehearsed_twice(pipeline, capsys):
    pipeline.rehearsed_for(SHAPES, True)
    capsys.readouterr()
    assert pipeline.rehearsed_for(SHAPES, True) == []
    assert pipeline.rehearsed_for(EVALUATED, False) == []
    assert capsys.readouterr().out == ""


def test_sizes_that_come_later_are_rehearsed_then(pipeline, capsys):
    pipeline.rehearsed_for(SHAPES, True)
    longer = replace(EVALUATED, sequence=16)
    assert pipeline.rehearsed_for(longer, False) == [(longer, False)]
    assert "> rehearsed the pipeline for evaluation in " in capsys.readouterr().out
    # Training with sizes that evaluation had already: the other kind alone.
    assert pipeline.rehearsed_for(replace(longer, mtp_depth=1), True) == [(replace(longer, mtp_depth=1), True)]


def test_a_job_that_only_evaluates_rehearses_no_training(pipeline):
    assert pipeline.rehearsed_for(EVALUATED, False) == [(EVALUATED, False)]


def test_slots_that_had_to_grow_are_said_with_their_reason(capsys):
    memory, said = HostMemory(pins=False), []
    memory.expect({0: 1})
    for size in (2**20, 2**21, 2**20):
        with saying_host_memory(memory):
            memory.give(memory.take(0, [size]))
        said.append(capsys.readouterr().out)
    assert "> allocated 0.00 GiB of host memory" in said[0] and "replace" not in said[0]
    assert ", also to replace 1 slots, because microbatches save different amounts" in said[1]
    assert said[2] == ""
