"""Records the arguments that a user's `forward_step` passes to the model, without running the model.

The runtime calls `forward_step(data_iterator, probe)`. When `forward_step` calls the probe, the probe records the
arguments and returns a placeholder, which `forward_step` returns together with the loss function. The runtime runs the
microbatch's passes later, when the schedule reaches them. Megatron scripts therefore work without changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from megatron.core.utils import unwrap_model

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.model_check import BEHIND_NEMO_RL
from megatron_vp.mcore.training.suspended import WAITS, Suspended
from megatron_vp.mcore.training.token_outputs import request_in, token_log_probs
from megatron_vp.runtime.buffers import Shapes

_NEXT_TOKENS = "return_logprobs_for_linear_ce_fusion"
"""The keyword by which NeMo-RL's own `GPTModel.forward` returns the log-probability of every token but the first,
[b, s - 1], from labels that are the token ids.
"""


class Placeholder(torch.Tensor):
    """Stands for the model's output, which is computed later. Any computation with a placeholder raises UserError."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UserError(
            "this forward_step computes with the model's output, which the schedule has not computed yet: move that "
            "computation to the loss function, which receives the token losses, or let the model return "
            "log-probabilities: pass it output_processor=megatron_vp.token_log_probs"
        )

    __torch_dispatch__ = __torch_function__


class Probe:
    """Replaces the model in one call of `forward_step`. Attribute reads are forwarded to the wrapped model and to the
    chunk inside. `pre_process` and `post_process` say whether this chunk's call must pass the tokens and the labels:
    those of the chunk itself are False if its vocabulary layers are split.
    """

    suspended: Suspended | None = None
    """The call of `forward_step`, if a call of the model with an output processor is to wait for its output."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.output = torch.Tensor._make_wrapper_subclass(Placeholder, ())
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call."""
        self.calls.append((args, kwargs))
        if self.suspended is not None and kwargs.get("output_processor") is not None:
            return self.suspended.wait_for_output()
        return self.output

    def __getattr__(self, name: str) -> Any:
        core = unwrap_model(self._model)
        if name == "pre_process":
            return core.pp_group.rank() == 0 and not core.vp_stage
        if name == "post_process":
            rank, stage = core.pp_group.rank(), core.vp_stage or 0
            return (rank + 1, stage + 1) == (core.pp_group.size(), core.vp_size or 1)
        return getattr(self._model if hasattr(self._model, name) else core, name)


class Capture:
    """The model's arguments and the loss function that `forward_step` provided for one microbatch on this rank.

    bound: the arguments of the chunk's `forward`.
    suspended: the call of `forward_step`, if it waits for the model's output; `loss_func` is None.
    next_tokens: whether `forward_step` is NeMo-RL's, and asks for the log-probabilities of the next tokens.
    """

    def __init__(
        self,
        bound: inspect.BoundArguments,
        loss_func: Any,
        suspended: Suspended | None = None,
        next_tokens: bool = False,
    ) -> None:
        self._bound, self.loss_func, self.suspended = bound, loss_func, suspended
        self._next_tokens = next_tokens
        if next_tokens:
            bound.arguments |= {"labels": self.argument("labels").roll(-1, 1), "output_processor": token_log_probs}
        self.request = request_in(self.argument("output_processor"), self.argument("output_processor_context"))

    def finish(self, output: Any) -> tuple[Any, Callable[..., Any]]:
        """Return what `forward_step` returns when the model returns `output`."""
        if self._next_tokens:
            output = output.log_probs[:, :-1]
        return (output, self.loss_func) if self.suspended is None else self.suspended.resume(output)

    def argument(self, name: str) -> Any:
        """Return the argument `name` that was passed to the model; None if it was omitted."""
        return self._bound.arguments.get(name)

    def sizes(self) -> tuple[int, ...] | None:
        """[b, s] of the microbatch; None if `forward_step` passes no tokens, labels or positions of this shape."""
        for name in ("input_ids", "labels", "position_ids"):
            value = self.argument(name)
            if isinstance(value, torch.Tensor) and not value.is_nested and value.dim() == 2:
                return tuple(value.shape)
        return None

    def keep(self, *names: str) -> None:
        """Free all arguments except the named ones. Call this method only after the model has run."""
        self._bound.arguments = {name: self.argument(name) for name in names}

    def run(self, model: torch.nn.Module, options: dict[str, Any], **replaced: Any) -> torch.Tensor:
        """Call the model with the captured arguments, except those that are `replaced`, and further `options`."""
        call = inspect.BoundArguments(self._bound.signature, self._bound.arguments | replaced)
        own = type(unwrap_model(model))
        with mock.patch.object(own, "forward", getattr(own, BEHIND_NEMO_RL)) if self._next_tokens else nullcontext():
            return model(*call.args[1:], **call.kwargs, **options)


def capture(
    forward_step: Callable[..., Any], data_iterator: Any, model: torch.nn.Module, *, suspends: bool = False
) -> Capture:
    """Run the user's `forward_step` with a probe in place of the model.

    suspends: whether `forward_step` waits for the model's output, if it calls the model with an output processor.

    Raises UserError if the data iterator is exhausted, if `forward_step` does not call the model exactly once and
    return its output unchanged, or if it passes the model an argument that our passes do not support.
    """
    probe = Probe(model)
    if not suspends:
        return _captured(lambda: forward_step(data_iterator, probe), data_iterator, model, probe)
    probe.suspended = Suspended(lambda: forward_step(data_iterator, probe))
    try:
        return _captured(probe.suspended.start, data_iterator, model, probe)
    except BaseException:
        probe.suspended.abandon()
        raise


def _captured(step: Callable[[], Any], data_iterator: Any, model: torch.nn.Module, probe: Probe) -> Capture:
    try:
        returned = step()
    except StopIteration as end:
        raise UserError(
            "forward_step ran out of data in the middle of an iteration: provide more data, lower "
            "--train-iters (or --train-samples), or make the data loader start over"
        ) from end
    except TypeError as error:
        if data_iterator is not None or "NoneType" not in str(error):
            raise
        raise UserError(
            "this forward_step reads data on a middle stage, but the script built no dataset on that stage: for packed "
            "sequences, make is_dataset_built_on_rank return True on every stage (NVIDIA's scripts do so only with "
            "--sft, and pretrain_gpt_vp.py also with --dataloader-inter-document-masking)"
        ) from error
    if len(probe.calls) != 1:
        raise UserError(
            f"this forward_step called the model {len(probe.calls)} times, but the schedule runs one call per "
            "microbatch: call the model exactly once, or leave --vocab-parallel and --pipeline-schedule out"
        )
    suspended = probe.suspended if returned is WAITS else None
    output, loss_func = (probe.output, None) if suspended else returned
    if output is not probe.output:
        raise UserError(
            "this forward_step does not return the model's output unchanged: return the output itself, and move any "
            "computation with it to the loss function"
        )
    # A loss function that refers to the model, as NVIDIA's does, keeps the probe alive, because the probe stands in for
    # the model. Remove the recorded call from the probe, so that the call's attention mask can be freed.
    args, kwargs = probe.calls.pop()
    core = unwrap_model(model)
    kwargs.pop("fp32_output", None)  # An argument of Megatron's wrapper for logits. Our outputs are fp32.
    next_tokens = kwargs.pop(_NEXT_TOKENS, False)
    try:
        forward = getattr(type(core), BEHIND_NEMO_RL if next_tokens else "forward")
        bound = inspect.signature(forward).bind_partial(None, *args, **kwargs)
    except TypeError as error:
        raise UserError(
            f"this forward_step does not call the model as Megatron defines it ({error}): leave out the arguments that "
            f"{type(core).__name__}.forward does not have, or leave --vocab-parallel and --pipeline-schedule out"
        ) from None
    captured = Capture(bound, loss_func, suspended, next_tokens)
    if captured.argument("decoder_input") is not None:
        raise UserError(
            "this forward_step calls the model with decoder_input (embeddings computed outside the model), which is "
            "not supported: leave decoder_input out, or leave --vocab-parallel and --pipeline-schedule out"
        )
    return captured


def check_packed(captured: Capture, shapes: Shapes, context_size: int) -> None:
    """Raise UserError if our passes cannot run a microbatch's packed sequences (format THD). The ends of documents are
    checked only if they are in CPU memory.

    Every attention layer must know where each document begins and ends. Each pipeline rank reads these boundaries
    itself, so the pipeline need not transport them. `context_size`: the number of context-parallel ranks.
    """
    packed = captured.argument("packed_seq_params")
    if packed is None:
        return
    ends = getattr(packed, "cu_seqlens_q", None)
    if getattr(packed, "qkv_format", None) != "thd" or ends is None:
        raise UserError(
            f"this forward_step passes packed sequences in the format {getattr(packed, 'qkv_format', None)} to the "
            "model, but only the format thd with cu_seqlens_q is supported: use this format, or leave --vocab-parallel "
            "and --pipeline-schedule out"
        )
    padded = packed.cu_seqlens_q_padded
    if shapes.mtp_depth and (context_size > 1 or (padded is not None and padded is not ends)):
        raise UserError(
            "--mtp-num-layers with packed sequences does not support --context-parallel-size above 1, because the next "
            "tokens may be on another rank, nor padding between documents (cu_seqlens_q_padded), because Megatron "
            "shifts labels by the unpadded lengths: pad packs only at the end, or leave one of these options out"
        )
    if shapes.batch > 1:
        raise UserError(
            f"packed sequences with --micro-batch-size {shapes.batch} are supported only with --sft or "
            "--dataloader-inter-document-masking, because otherwise the schedule expects separate sequences: use one "
            "of these options, or --micro-batch-size 1"
        )
    shape, found = [1, shapes.sequence], []
    for name in ("input_ids", "labels"):
        value = captured.argument(name)
        if value is not None and not value.is_nested and list(value.shape) != shape:
            found.append(f"{name} of shape {list(value.shape)}")
    ends = ends if padded is None else padded
    if ends.device.type == "cpu" and int(ends[-1]) != shapes.sequence * context_size:
        found.append(f"documents that end at position {int(ends[-1])}")
    for each in found:
        raise UserError(
            f"forward_step passed {each} to the model, but pipeline ranks exchange tensors of one fixed shape, here "
            f"{shapes.sequence} tokens: pass the length of a packed sequence as seq_length (--seq-length in Megatron's "
            "scripts), and pad every packed sequence to it"
        )
