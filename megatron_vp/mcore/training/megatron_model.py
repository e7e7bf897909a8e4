"""Connects the runtime to the chunks that Megatron built on a rank, and to the user's data and loss function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config, unwrap_model

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.delayed_weights import delaying_layers
from megatron_vp.mcore.model.layer_plans import Plan, plan_of, run_plans
from megatron_vp.mcore.model.multi_token import append_next_tokens, with_further_predictions
from megatron_vp.mcore.model.split_backward import (
    accumulate_all,
    accumulate_collected,
    backward_without_weights,
    forward_of,
)
from megatron_vp.mcore.training.capture import Capture, capture, check_packed
from megatron_vp.mcore.training.loss_check import check_labels
from megatron_vp.mcore.training.token_outputs import (
    TokenOutputs,
    TokenRequest,
    check_entropies,
    may_be_requested,
    token_log_probs,
)
from megatron_vp.runtime.buffers import Shapes
from megatron_vp.schedule.passes import PassKind, Schedule, VocabMethod


class MegatronModel:
    """One rank's transformer layers, and the user's data and loss function, in one iteration. The runtime knows a model
    only by the public methods of this class.

    Args:
        chunks: the rank's model chunks, as Megatron wrapped them (DDP, Float16Module).
        forward_step, data_iterators: the user's function and data, as Megatron passes them to a schedule; one iterator
            per chunk.
        gradients: whether gradients are computed; False in evaluation.
        rank: the pipeline rank. Rank 0 may start gradient synchronisation during the last backward even with Megatron's
            `align_grad_reduce`.
        context_group: the context-parallel group, whose ranks share each sequence.
        first_val_step: as Megatron passes it; False in evaluation if cached quantised weights are still valid.
        collects: whether the loss function returns data instead of a loss, as with Megatron's `collect_non_loss_data`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        forward_step: Callable[..., Any],
        data_iterators: Sequence[Any],
        schedule: Schedule,
        rank: int,
        shapes: Shapes,
        gradients: bool,
        context_group: dist.ProcessGroup,
        first_val_step: bool | None = None,
        collects: bool = False,
    ) -> None:
        self._config = get_model_config(chunks[0])
        # If Megatron aligns gradient synchronisation between ranks, only the first rank starts the synchronisation
        # inside the schedule, as in Megatron's 1F1B.
        self._synchronises_inside = self._config.grad_sync_func is None or (rank == 0 and len(chunks) == 1)
        held = _listed(self._config.no_sync_func if gradients else None, len(chunks))
        # The request of the whole iteration, once the ranks have agreed on it.
        self.request: TokenRequest | None = None
        self._agreed, self._rank, self._runs_loss = False, rank, rank == len(schedule.ranks) - 1
        self._chunks = [_Chunk(*each) for each in zip(chunks, data_iterators, held, strict=True)]
        self._forward_step, self._schedule, self._shapes = forward_step, schedule, shapes
        self._gradients, self._context_group, self._collects = gradients, context_group, collects
        self._replays_graphs = gradients and self._config.cuda_graph_impl == "transformer_engine"
        self._keeps_outputs = self._config.cuda_graph_impl == "local"
        self._late_weights = late_weights(schedule, rank)
        self._weights_changed = gradients or first_val_step is not False
        self._overlaps = gradients and self._config.overlap_moe_expert_parallel_comm
        self._plans: dict[tuple[int, int], Plan] = {}
        self._pending_weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.losses: list[Any] = []
        """The reports of the user's loss function, one per microbatch; only on the last pipeline rank."""
        self.tokens_seen = torch.zeros([], dtype=torch.int, device=shapes.device)
        self._output_options = {"fp32_output": False} if self._config.fp16 or self._config.bf16 else {}

    def asks_for(self) -> tuple[TokenRequest | None, list[Any]]:
        """Read data ahead. Return the request with which this rank's `forward_step` calls its last chunk for the first
        microbatch, None without a request, and the sizes of all microbatches if they may differ, None if unknown.
        """
        request = self._capture(self._chunks[-1], 0).request
        if not self._config.variable_seq_lengths:
            return request, []
        chunk = self._chunks[0 if self._rank == 0 else -1]
        return request, [self._capture(chunk, each).sizes() for each in range(self._schedule.microbatches)]

    def agree(self, request: TokenRequest | None, shapes: Shapes) -> None:
        """Set the request and the sizes of all microbatches of the iteration."""
        self.request, self._shapes, self._agreed = request, shapes, True
        for chunk in self._chunks:
            for microbatch in chunk.captures:
                self._check(chunk, microbatch)

    def load(self, chunk: int, microbatch: int) -> None:
        """Read the data that a chunk with an unsharded vocabulary layer uses, by calling the user's `forward_step`.
        Only ranks 0 and p-1 call this method.
        """
        self._capture(self._chunks[chunk], microbatch)

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Token ids, int64 [b, e], laid out as in `Shapes.token_ids`; only for rank 0."""
        return self._extended(self._token_ids("input_ids", self._chunks[0], microbatch))

    def labels(self, microbatch: int) -> torch.Tensor:
        """Labels, int64 [b, e], laid out as in `Shapes.token_ids`; only for rank p-1."""
        return self._extended(self._token_ids("labels", self._chunks[-1], microbatch))

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """Run Megatron's embedding layer on rows that were already looked up: from [b, s, h] to [s / sp_size, b, h]."""
        position_ids = self._capture(self._chunks[0], microbatch).argument("position_ids")
        return self._chunks[0].core.embedding(input_ids=words_bsh, position_ids=position_ids)

    def receive_words(self, words_rh: torch.Tensor) -> None:
        """Store the embedding rows [b e, h] that multi-token prediction uses in the next forward of its chunk."""
        words_beh = words_rh.view(self._shapes.batch, -1, self._shapes.hidden)
        core = next(chunk.core for chunk in self._chunks if hasattr(chunk.core, "received_embedding"))
        rows = core.received_embedding.word_embeddings
        rows.ahead = (self._shapes.ahead(words_beh, depth) for depth in range(1, self._shapes.predictions))
        rows.beyond = words_beh[:, -1:]

    def forward(
        self, chunk: int, microbatch: int, input_sbh: torch.Tensor | None, labels_bs: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the chunk on its input [s / sp_size, b, h], or on None if the chunk has an unsharded embedding.

        Return the output, of the same shape, or token losses, fp32 [b, s], if the chunk has an unsharded output layer.
        Its labels are `labels_bs`, or the labels that this rank has loaded itself if `labels_bs` is None.
        """
        return self._forward(chunk, microbatch, input_sbh, labels_bs)

    def forward_and_backward(
        self,
        forward: tuple[int, int, torch.Tensor | None, torch.Tensor | None],
        backward: tuple[int, int, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Run `forward` and `backward`, given the arguments of both, as one: layer by layer, so that the expert
        communication of each overlaps with the computation of the other. Return what `forward` returns.
        """
        chunk, microbatch, _, gradient = backward
        late = partial(accumulate_collected, self._chunks[chunk].delaying) if self._schedule.split_backward else None
        behind = self._plans.pop((chunk, microbatch)), gradient, late
        made: list[torch.Tensor] = []
        self._run_backward(chunk, microbatch, lambda: made.append(self._forward(*forward, *behind)))
        return made[0]

    def _forward(
        self, chunk: int, microbatch: int, input_sbh: torch.Tensor | None, labels_bs: torch.Tensor | None, *behind: Any
    ) -> torch.Tensor:
        """Run a forward, and as one with it the backward whose plan and further arguments of `run_plans` follow."""
        self._start_timer()
        part = self._chunks[chunk]
        captured = self._capture(part, microbatch)
        # After the optimizer has changed the weights, fp8 layers must quantise them again, even in evaluation.
        if microbatch == 0 and self._weights_changed and hasattr(part.model, "set_is_first_microbatch"):
            part.model.set_is_first_microbatch()
        schedules.set_current_microbatch(part.model, microbatch)
        taken = input_sbh
        if self._replays_graphs and input_sbh is not None:
            # The backward of a CUDA graph always writes the input's gradient to the same buffer. Copy the gradient,
            # because a send may still read it when the next backward overwrites the buffer.
            taken = input_sbh.view_as(input_sbh)
            taken.register_hook(torch.clone)
        part.core.set_input_tensor(taken)
        replaced: dict[str, Any] = {} if labels_bs is None else {"labels": labels_bs}
        if self.request is not None and part.core.post_process:
            replaced |= {"output_processor": token_log_probs, "output_processor_context": self.request}
        with forward_of(part.core):
            if self._overlaps:
                self._plans[chunk, microbatch] = captured.run(partial(plan_of, part.core), {}, **replaced)
                output = run_plans(self._plans[chunk, microbatch], *behind)
                if hasattr(part.core, "received_embedding"):
                    rows = part.core.received_embedding.word_embeddings
                    rows.ahead = rows.beyond = None
            else:
                output = captured.run(part.model, self._output_options, **replaced)
        if self.request is not None and part.core.post_process:
            output = output.values()
        part.core.set_input_tensor(None)
        if part.core.post_process:
            # Copy the output, because `release_output` may free its data.
            output = output.float().clone(memory_format=torch.contiguous_format)
        elif output is taken or self._keeps_outputs:
            # The output is the input of a hybrid segment without layers, or a buffer of Megatron's CUDA graph, which
            # `release_output` must not free.
            output = output.clone()
        # The loss function, which runs later, needs these arguments, but the attention mask can be freed.
        captured.keep("labels", "loss_mask", "packed_seq_params")
        self._calculate_loss(part, output)
        return output

    def release_output(self, output: torch.Tensor) -> None:
        """Free the output's data unless another tensor uses the data, but keep the output's autograd graph."""
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def backward(self, chunk: int, microbatch: int, output: torch.Tensor, gradient: torch.Tensor) -> None:
        """Run the backward of the chunk, which adds gradients to the leaves' `grad` and the parameters' `main_grad`.

        In a schedule with W passes, weight gradients are left to `weight_gradient`. The last backward of the iteration
        lets Megatron synchronise gradients.
        """

        def run() -> None:
            if self._overlaps:
                left_to_w = (lambda: None) if self._schedule.split_backward else None
                run_plans(None, self._plans.pop((chunk, microbatch)), gradient, left_to_w)
            else:
                schedules.backward_step(None, output, gradient, self._config)

        self._run_backward(chunk, microbatch, run)

    def _run_backward(self, chunk: int, microbatch: int, run: Callable[[], Any]) -> None:
        part = self._chunks[chunk]
        part.backwards += 1
        if part.backwards == self._schedule.microbatches and self._synchronises_inside:
            part.held.close()
        if self._schedule.split_backward:
            late = (chunk, microbatch) in self._late_weights
            self._pending_weights[chunk, microbatch] = backward_without_weights(run, part.delaying, late)
        else:
            run()

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Run pass W: accumulate the weight gradients that pass B did not compute."""
        accumulate_all(self._pending_weights.pop((chunk, microbatch)))

    def loss(
        self, microbatch: int, token_loss_bs: torch.Tensor, target_is_argmax_bs: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the user's loss function on token losses, fp32 [b, s], with averaging and scaling as in Megatron's
        schedules. Return g, the gradient with respect to the token losses, fp32 [b, s]; None in evaluation.

        `target_is_argmax_bs` marks the targets that have the largest logit; it is None if the vocabulary layers are
        unsharded. With multi-token prediction, these tensors have the shape [predictions * b, s]. If entropies are
        requested, they follow the token losses, [2, b, s], and so do their gradients. Called only on the last pipeline
        rank, in microbatch order.
        """
        self._start_timer()
        token_loss_bs.requires_grad_(self._gradients)
        part = self._chunks[-1]
        labels_bs = self._token_ids("labels", part, microbatch)
        captured = part.captures.pop(microbatch)
        next_loss_bs: Any = token_loss_bs
        if self.request is not None:
            next_loss_bs = TokenOutputs.of(token_loss_bs, self.request)
        if self._shapes.mtp_depth:
            given = labels_bs, captured.argument("loss_mask"), self._config, self._context_group
            packed = captured.argument("packed_seq_params")
            next_loss_bs = with_further_predictions(token_loss_bs, target_is_argmax_bs, *given, packed)
        output, loss_func = captured.finish(next_loss_bs)
        if self._collects:
            loss_func = partial(_collected, loss_func)
        loss, token_count = self._calculate_loss(part, output, loss_func)
        self.tokens_seen += token_count
        # A microbatch without a response may have a loss that depends on no log-probability.
        if self._gradients and (self.request is None or loss.requires_grad):
            scaled = loss if self._config.grad_scale_func is None else self._config.grad_scale_func(loss)
            scaled.backward()
        gradient = token_loss_bs.grad
        if self._gradients and gradient is None and self.request is not None:
            gradient = torch.zeros_like(token_loss_bs)
        entropies = self.request is not None and self.request.entropy
        of_losses = gradient[0] if gradient is not None and entropies else gradient
        check_labels(microbatch, labels_bs, of_losses, part.core.vocab_size)
        check_entropies(gradient, self.request)
        return gradient

    def abandon(self) -> None:
        """End each `forward_step` that still waits for the model's output, after an exception."""
        for chunk in self._chunks:
            for captured in chunk.captures.values():
                if captured.suspended is not None:
                    captured.suspended.abandon()

    def finish(self) -> None:
        """Start the gradient synchronisations that did not start during the schedule."""
        for chunk in self._chunks:
            # With --exit-signal-handler, the workers of a data loader stop only when the last reference to their
            # iterator is dropped. Drop it now, without waiting for the garbage collector.
            chunk.data_iterator = None
        if not self._gradients:
            return
        aligned = _listed(self._config.grad_sync_func, len(self._chunks))
        for chunk, synchronise in zip(self._chunks, aligned, strict=True):
            model, settings = chunk.model, getattr(chunk.model, "ddp_config", None)
            chunk.held.close()
            if not self._synchronises_inside:
                synchronise(model.parameters())
            elif settings is not None and settings.overlap_grad_reduce:
                # Megatron reduces a bucket when all of its parameters have reported that their gradients are ready.
                # Parameters in autograd's graph report through a hook. Passes T, IB and W write the gradients of the
                # others.
                for parameter, bucket in model.param_to_bucket_group.items():
                    if parameter not in bucket.per_param_grad_ready_counts:
                        bucket.register_grad_ready(parameter, model.force_all_reduce)

    def _capture(self, chunk: _Chunk, microbatch: int) -> Capture:
        """Call `forward_step` for the microbatches that have not been read yet, in order, up to and including
        `microbatch`. Microbatches are read as late as possible, because their attention masks can take a lot of memory.
        """
        while chunk.captured <= microbatch:
            suspends = self._runs_loss and chunk is self._chunks[-1] and may_be_requested()
            captured = capture(self._forward_step, chunk.data_iterator, chunk.model, suspends=suspends)
            if captured.request is not None and captured.request.entropy_gradient is None:
                supported = self._schedule.vocab in (VocabMethod.NONE, VocabMethod.VOCAB_1)
                captured.request = replace(captured.request, entropy_gradient=supported)
            chunk.captures[chunk.captured] = captured
            if self._agreed:
                self._check(chunk, chunk.captured)
            chunk.captured += 1
        return chunk.captures[microbatch]

    def _check(self, chunk: _Chunk, microbatch: int) -> None:
        captured = chunk.captures[microbatch]
        names = "packed_seq_params", "padding_mask", *["output_processor"] * chunk.core.post_process
        left_out = [name for name in names if captured.argument(name) is not None]
        if self._overlaps and left_out:
            raise UserError(
                f"--overlap-moe-expert-parallel-comm does not support {left_out[0]}, which this forward_step passes to "
                "the model: Megatron's plans of layers do not take it everywhere; leave the option out"
            )
        check_packed(captured, self._shapes.of(microbatch), self._context_group.size())
        asked = captured.request
        if asked != self.request and (asked is not None or (self._runs_loss and chunk is self._chunks[-1])):
            raise UserError(
                f"forward_step asks for {asked or 'token losses'} in microbatch {microbatch}, but for "
                f"{self.request or 'token losses'} in microbatch 0: ask for the same in all microbatches of a call"
            )

    def _extended(self, values_bs: torch.Tensor) -> torch.Tensor:
        """Token ids or labels, [b, e], laid out as in `Shapes.token_ids`."""
        return append_next_tokens(values_bs, self._shapes.mtp_depth, self._shapes.cp_chunks, self._context_group)

    def _token_ids(self, name: str, chunk: _Chunk, microbatch: int) -> torch.Tensor:
        value = self._capture(chunk, microbatch).argument(name)
        shapes, found = self._shapes.of(microbatch), None if value is None else list(value.shape)
        expected = [shapes.batch, shapes.sequence]
        if found != expected:
            raise UserError(
                f"--pipeline-schedule needs {name} of shape [micro batch, sequence] = {expected}, but forward_step "
                f"passed {'nothing' if found is None else f'shape {found}'} to the model for microbatch {microbatch}: "
                f"pass {name} in that shape"
            )
        return value.contiguous()

    def _calculate_loss(
        self, chunk: _Chunk, output: torch.Tensor, loss_func: Callable[..., Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Finish a forward as Megatron's schedules do: with `loss_func`, compute the loss and the token count; in any
        case, stop the timer and scale the gradients of losses that layers themselves add, such as a router's
        load-balancing loss.
        """
        return schedules.forward_step_calc_loss(
            chunk.model,
            output,
            loss_func,
            self._config,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=self._schedule.microbatches,
            forward_data_store=self.losses,
            cp_group_size=self._context_group.size(),
            is_last_stage=loss_func is not None,
        )

    def _start_timer(self) -> None:
        if self._config.timers is not None:
            self._config.timers("forward-compute", log_level=2).start()


def late_weights(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """Return the (chunk, microbatch) pairs for which the rank runs another F or B between B and W."""
    late, latest = set(), None
    for step in schedule.ranks[rank]:
        which = (step.chunk, step.microbatch)
        if step.kind in (PassKind.F, PassKind.B, PassKind.BW):
            latest = which
        elif step.kind is PassKind.W and latest != which:
            late.add(which)
    return frozenset(late)


def _collected(loss_func: Callable[..., Any], output: Any) -> tuple[torch.Tensor, Any]:
    """Call a loss function that returns data instead of a loss. Return a loss of 0, and the data as its report."""
    return torch.zeros([]), loss_func(output, non_loss_data=True)


class _Chunk:
    """One model chunk of the rank in one iteration: its captured microbatches, and the progress of its passes.

    held: Megatron's `no_sync`, inside which it synchronises no gradients, with or without Megatron's DDP.
    """

    def __init__(self, model: torch.nn.Module, data_iterator: Any, no_sync: Callable[[], Any] | None) -> None:
        self.model = model
        self.core = unwrap_model(model)
        self.data_iterator = data_iterator
        self.captures: dict[int, Capture] = {}
        self.captured = self.backwards = 0
        self.delaying = delaying_layers(model)
        self.held = ExitStack()
        self.held.enter_context((no_sync or nullcontext)())


def _listed(value: Any, count: int) -> list[Any]:
    """Return a list of functions, one per chunk. Megatron passes a list only if a rank has several chunks."""
    return value if isinstance(value, list) else [value] * count
