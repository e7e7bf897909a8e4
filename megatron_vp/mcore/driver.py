"""The transformer part of one rank as the runtime sees it: Megatron's chunk, the user's data and loss function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_vp.errors import UserError
from megatron_vp.mcore.capture import Capture, capture
from megatron_vp.mcore.split_backward import PendingWeightGradient, backward_without_weights
from megatron_vp.runtime.model import Shapes


class MegatronModel:
    """Implements `megatron_vp.runtime.model.Model` for one iteration.

    Args:
        chunk: the rank's model chunk, as Megatron wrapped it (DDP, Float16Module).
        forward_step, data_iterator: the user's, as Megatron hands them to a schedule.
        microbatches: m.
        shapes: expected sizes of a microbatch.
        gradients: False in evaluation.
        is_first_rank: this is pipeline rank 0, whose gradients may be synchronised during the last backward even when
            Megatron aligns the synchronisation of the ranks.
        context_parallel_size: for Megatron's loss scaling.
        split_backward: pass B leaves weight gradients to a pass W.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        forward_step: Callable[..., Any],
        data_iterator: Any,
        microbatches: int,
        shapes: Shapes,
        gradients: bool,
        is_first_rank: bool,
        context_parallel_size: int,
        split_backward: bool,
    ) -> None:
        self._chunk = chunk
        self._core = get_attr_wrapped_model(chunk, "embedding", return_model_obj=True)
        self._config = get_model_config(chunk)
        self._forward_step = forward_step
        self._data_iterator = data_iterator
        self._microbatches = microbatches
        self._shapes = shapes
        self._gradients = gradients
        self._context_parallel_size = context_parallel_size
        self._captures: dict[int, Capture] = {}
        self._captured = 0
        self._backwards = 0
        self._split_backward = split_backward
        self._pending_weights: dict[tuple[int, int], list[PendingWeightGradient]] = {}
        self._weight_passes = 0
        self.losses: list[Any] = []
        """What the user's loss function reported, one entry a microbatch; on the last pipeline rank only."""
        self.tokens_seen = torch.zeros([], dtype=torch.int, device=shapes.device)
        self._output_options = {"fp32_output": False} if self._config.fp16 or self._config.bf16 else {}
        # With aligned gradient synchronisation only the first rank starts inside the schedule, as in Megatron's 1F1B.
        self._synchronises_in_schedule = self._config.grad_sync_func is None or is_first_rank
        self._complete: list[torch.nn.Parameter] = []
        self._no_sync = (self._config.no_sync_func or nullcontext)() if gradients else nullcontext()
        self._no_sync.__enter__()
        self._synchronising = False

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Token ids, int64 [b, s]."""
        return self._token_ids("input_ids", microbatch)

    def labels(self, microbatch: int) -> torch.Tensor:
        """Labels, int64 [b, s]."""
        return self._token_ids("labels", microbatch)

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """Megatron's embedding without the look-up: [b, s, h] to [s, b, h]."""
        position_ids = self._capture(microbatch).argument("position_ids")
        return self._core.embedding(input_ids=words_bsh, position_ids=position_ids)

    def forward(self, chunk: int, microbatch: int, input_sbh: torch.Tensor) -> torch.Tensor:
        """The decoder layers of the chunk, and on the last stage the final norm: [s, b, h] to [s, b, h]."""
        self._start_timer("forward-compute")
        captured = self._capture(microbatch)
        if microbatch == 0 and self._gradients and hasattr(self._chunk, "set_is_first_microbatch"):
            self._chunk.set_is_first_microbatch()
        schedules.set_current_microbatch(self._chunk, microbatch)
        self._core.set_input_tensor(input_sbh)
        output_sbh = self._chunk(*captured.args, **captured.kwargs, **self._output_options)
        # The loss function is still to come, the attention mask has done its work.
        captured.args, captured.kwargs = (), {}
        self._stop_timer("forward-compute")
        return output_sbh

    def release_output(self, output_sbh: torch.Tensor) -> None:
        """Free the data of an output that lives on elsewhere; its graph remains."""
        schedules.deallocate_output_tensor(output_sbh, self._config.deallocate_pipeline_outputs)

    def backward(self, chunk: int, microbatch: int, output_sbh: torch.Tensor, gradient_sbh: torch.Tensor) -> None:
        """Backward of the chunk; the last one of the iteration lets Megatron synchronise gradients."""
        self._backwards += 1
        if self._backwards == self._microbatches and self._synchronises_in_schedule:
            self._start_synchronising()
        if self._split_backward:
            self._pending_weights[chunk, microbatch] = backward_without_weights(
                lambda: schedules.backward_step(None, output_sbh, gradient_sbh, self._config)
            )
        else:
            schedules.backward_step(None, output_sbh, gradient_sbh, self._config)

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Pass W: the weight gradients that the backward left; after the last one they are complete."""
        pending = self._pending_weights.pop((chunk, microbatch))
        for each in pending:
            each.accumulate()
        self._weight_passes += 1
        if self._weight_passes == self._microbatches:
            for weight in dict.fromkeys(each.weight for each in pending):
                self.gradient_complete(weight)

    def loss(self, microbatch: int, token_loss_bs: torch.Tensor) -> torch.Tensor | None:
        """The user's loss function, averaged and scaled as Megatron's schedules do it; returns g, fp32 [b, s]."""
        self._start_timer("forward-compute")  # forward_step_calc_loss stops it
        token_loss_bs.requires_grad_(self._gradients)
        loss, token_count = schedules.forward_step_calc_loss(
            self._chunk,
            token_loss_bs,
            self._captures.pop(microbatch).loss_func,
            self._config,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=self._microbatches,
            forward_data_store=self.losses,
            cp_group_size=self._context_parallel_size,
            is_last_stage=True,
        )
        self.tokens_seen += token_count
        if not self._gradients:
            return None
        if self._config.grad_scale_func is not None:
            loss = self._config.grad_scale_func(loss)
        loss.backward()
        return token_loss_bs.grad

    def gradient_complete(self, parameter: torch.nn.Parameter) -> None:
        """Report a weight whose gradient autograd never saw to Megatron's buckets, as autograd's hook would."""
        if self._synchronising:
            self._register(parameter)
        else:
            self._complete.append(parameter)

    def finish(self) -> None:
        """The end of the schedule: start the gradient synchronisation that has not started yet."""
        if not self._gradients or self._synchronising:
            return
        aligned = self._config.grad_sync_func
        if aligned is None:
            self._start_synchronising()
        else:
            self._no_sync.__exit__(None, None, None)
            aligned(self._chunk.parameters())

    def _start_synchronising(self) -> None:
        self._no_sync.__exit__(None, None, None)
        self._synchronising = True
        for parameter in self._complete:
            self._register(parameter)

    def _register(self, parameter: torch.nn.Parameter) -> None:
        settings = getattr(self._chunk, "ddp_config", None)
        if settings is not None and settings.overlap_grad_reduce:
            self._chunk.param_to_bucket_group[parameter].register_grad_ready(parameter, self._chunk.force_all_reduce)

    def _capture(self, microbatch: int) -> Capture:
        """Data in order, and no earlier than needed: an attention mask can be large."""
        while self._captured <= microbatch:
            self._captures[self._captured] = capture(self._forward_step, self._data_iterator, self._chunk)
            self._captured += 1
        return self._captures[microbatch]

    def _token_ids(self, name: str, microbatch: int) -> torch.Tensor:
        value = self._capture(microbatch).argument(name)
        expected = (self._shapes.batch, self._shapes.sequence)
        if value is None or tuple(value.shape) != expected:
            found = "nothing" if value is None else f"a tensor {list(value.shape)}"
            raise UserError(
                f"vocabulary parallelism needs {name} of shape [micro batch, sequence] = {list(expected)} from "
                f"forward_step's call of the model, and got {found} for microbatch {microbatch}"
            )
        return value.contiguous()

    def _start_timer(self, name: str) -> None:
        if self._config.timers is not None:
            self._config.timers(name, log_level=2).start()

    def _stop_timer(self, name: str) -> None:
        if self._config.timers is not None:
            self._config.timers(name).stop()
