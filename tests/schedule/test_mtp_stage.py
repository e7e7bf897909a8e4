"""Test programs in which a stage with multi-token prediction uses embedded rows."""

import pytest

from megatron_vp.schedule.families import generate
from megatron_vp.schedule.instructions import Run, Wait
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, VocabMethod
from megatron_vp.schedule.transfers import Collective, CollectiveKind
from megatron_vp.schedule.validate import validate_programs


def _embeds(program):
    """The instructions of a rank that wait for embedded rows or run a forward, in order."""
    for instruction in program.instructions:
        if isinstance(instruction, Wait) and isinstance(instruction.operation, Collective):
            if instruction.operation.kind is CollectiveKind.EMBED:
                yield "rows", instruction.operation.microbatch
        elif isinstance(instruction, Run) and instruction.action.kind is PassKind.F:
            yield "forward", instruction.action.microbatch


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half"])
@pytest.mark.parametrize("method", [VocabMethod.VOCAB_1, VocabMethod.VOCAB_2])
@pytest.mark.parametrize(("size", "microbatches"), [(2, 1), (3, 4), (4, 16)])
@pytest.mark.parametrize("behind", [0, 1])
def test_the_forward_of_further_predictions_waits_for_its_rows(name, method, size, microbatches, behind):
    """The stage of multi-token prediction is the last, or has one stage behind it."""
    schedule = generate(name, size, microbatches, vocab=method)
    mtp_stage = max(1, schedule.placement.stages - 1 - behind)
    programs = lower(schedule, mtp_stage=mtp_stage)
    validate_programs(programs)
    first, last = schedule.placement.first_rank, schedule.placement.rank_of(mtp_stage)
    for program in programs:
        steps = list(_embeds(program))
        waits = [microbatch for step, microbatch in steps if step == "rows"]
        assert sorted(waits) == (list(range(microbatches)) if program.rank in (first, last) else [])
        for microbatch in waits:
            forwards = [place for place, step in enumerate(steps) if step == ("forward", microbatch)]
            place = steps.index(("rows", microbatch))
            # On one rank both ends share the wait; else the last chunk's forward is the rank's last of a microbatch.
            assert place < (forwards[0] if program.rank == first else forwards[-1])
