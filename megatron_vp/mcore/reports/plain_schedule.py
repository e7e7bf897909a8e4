"""Records Megatron's own schedules in the same form as ours: every forward or backward step is recorded as a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from megatron_vp.mcore.reports.watch import watch
from megatron_vp.mcore.settled import current
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.store import Occupancy
from megatron_vp.schedule import Placement, Schedule, VocabMethod, megatrons_own
from megatron_vp.schedule.instructions import Run
from megatron_vp.schedule.passes import Pass, PassKind


class _Steps:
    """Times the steps of the current iteration, and counts the microbatches whose activations are in memory."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forwards: Counter[int] = Counter()
        self._outputs: dict[int, tuple[Any, Pass]] = {}
        self.in_flight = Occupancy()

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run and record one of Megatron's forward steps. Each chunk's forward steps process microbatches in order."""
        chunk = kwargs.get("vp_stage") or 0
        step = Pass(PassKind.F, self._forwards[chunk], chunk)
        self._forwards[chunk] += 1
        with self._recorder.span(Run(step)):
            result = original(*args, **kwargs)
        self.in_flight.enter()
        self._outputs[id(_output(result[0]))] = _output(result[0]), step._replace(kind=PassKind.B)
        return result

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run and record one of Megatron's backward steps. The output tensor identifies the matching forward step."""
        output = _output(kwargs["output_tensor"] if "output_tensor" in kwargs else args[1])
        _, step = self._outputs.pop(id(output))
        with self._recorder.span(Run(step)):
            result = original(*args, **kwargs)
        self.in_flight.leave()
        return result


def _output(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


_steps: _Steps | None = None
"""The recording of the current iteration of Megatron's own schedule; None if the iteration is not recorded."""


def _watched_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_backward(**arguments: Any) -> Any:
        global _steps
        group = parallel_state.get_pipeline_model_parallel_group()
        watched = None if arguments["forward_only"] else watch(current(), group)
        if watched is None:
            return original(**arguments)
        _steps = steps = _Steps(watched.recorder)
        try:
            result = original(**arguments)
        finally:
            _steps = None
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        placement = Placement.round_robin(group.size(), len(chunks))
        ran = Schedule(megatrons_own(len(chunks)).name, VocabMethod.NONE, placement, arguments["num_microbatches"], ())
        watched.finish(chunks, ran, steps.in_flight.peak / len(chunks))
        return result

    return forward_backward


def _watched_step(step: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if _steps is None else step(_steps, original, *args, **kwargs)

        return run

    return wrap


_watched_forward, _watched_backward = _watched_step(_Steps.forward), _watched_step(_Steps.backward)
