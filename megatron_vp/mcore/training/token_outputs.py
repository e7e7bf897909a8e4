"""Log-probabilities of given labels and entropies of the softmax, per token, for loops that train on them.

A loop passes `token_log_probs` to Megatron's model as `output_processor`, and a `TokenRequest` as
`output_processor_context`. With --vocab-parallel, our schedules recognise this function and compute the same answer
from shards, without running it. On plain Megatron, the function runs on the last stage, on the logits of each tensor
rank. In both cases, the matrix that is kept for the backward has the model's dtype. This module imports no Megatron,
because a loop may import it before it calls `megatron_vp.enable`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_vp.errors import UserError
from megatron_vp.mcore.training.loss_check import defer, outside_vocabulary
from megatron_vp.vocab.loss import CROSS_ENTROPY, MAX, Derivative, GlobalStatistics
from megatron_vp.vocab.operations import operations_for

taken = False
"""Whether a script has taken a name of this module from `megatron_vp`."""

_VERL = "verl.models.mcore.model_forward_fused", "fused_output_processor"
"""Module and name of an output processor that computes the same: log-probabilities and entropies, at the temperature of
its context. Its loop reads the answer's `log_probs` and `entropy`.
"""


def may_be_requested() -> bool:
    """Whether `forward_step` can make a request: else, nothing has imported a function for it."""
    return taken or _VERL[0] in sys.modules


@dataclass(frozen=True)
class TokenRequest:
    """What `token_log_probs` computes.

    Args:
        temperature: divides the logits.
        entropy: whether to compute the entropy of every token's softmax.
        entropy_gradient: whether the loss depends on the entropy; implies `entropy`. None, in a request that we
            translate, stands for True with methods that support it.
    """

    temperature: float = 1.0
    entropy: bool = False
    entropy_gradient: bool | None = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"a TokenRequest has temperature={self.temperature}: give a positive number")
        object.__setattr__(self, "entropy", self.entropy or bool(self.entropy_gradient))


@dataclass
class TokenOutputs:
    """The answer to a `TokenRequest`: fp32 [b, s] each; `entropy` is None unless it was requested."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None

    @classmethod
    def of(cls, values: torch.Tensor, request: TokenRequest) -> TokenOutputs:
        """The answer to `request` from token losses [b, s], or from token losses and entropies [2, b, s]."""
        return cls(-values[0], values[1]) if request.entropy else cls(-values)

    def values(self) -> torch.Tensor:
        """The inverse of `of`."""
        return -self.log_probs if self.entropy is None else torch.stack([-self.log_probs, self.entropy])


def request_in(processor: Any, context: Any) -> TokenRequest | None:
    """The request in a call of the model; None if the call asks for token losses."""
    if processor is None:
        return None
    if (getattr(processor, "__module__", ""), getattr(processor, "__qualname__", "")) == _VERL:
        return TokenRequest(context.temperature, entropy=True, entropy_gradient=None)
    if processor is not token_log_probs:
        raise UserError(
            f"this forward_step passes output_processor={getattr(processor, '__qualname__', processor)} to the model, "
            "but our schedules have no logits to give it: pass megatron_vp.token_log_probs, or leave --vocab-parallel "
            "and --pipeline-schedule out"
        )
    return _checked(context)


def check_entropies(gradient: torch.Tensor | None, request: TokenRequest | None) -> None:
    """Raise UserError, at the end of the iteration, if the loss depends on entropies although the request denies it.

    gradient: the gradient with respect to token losses and entropies, [2, b, s]; None in evaluation.
    """
    if gradient is None or request is None or request.entropy_gradient or not request.entropy:
        return
    depends = gradient[1].any()

    def judge() -> None:
        if depends:
            raise UserError(
                "the loss depends on the entropy, but the TokenRequest has entropy_gradient=False: set it to True "
                "(with verl, use --vocab-parallel-algorithm vocab-1), or detach the entropy"
            )

    defer(judge)


def _checked(context: Any) -> TokenRequest:
    if isinstance(context, TokenRequest | None):
        return context or TokenRequest()
    raise UserError(
        f"output_processor_context is a {type(context).__name__}, but megatron_vp.token_log_probs needs a "
        "megatron_vp.TokenRequest: pass one"
    )


def token_log_probs(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor | None,
    context: TokenRequest | None,
    scale_logits: Any,
    **_others: Any,
) -> TokenOutputs:
    """Compute the log-probabilities of `labels` and, if requested, entropies; an `output_processor` for Megatron."""
    request = _checked(context)
    if labels is None:
        raise UserError(
            "megatron_vp.token_log_probs needs labels: pass the model labels of shape [micro batch, sequence]"
        )
    logits, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
    logits_sbv = scale_logits(logits)
    sizes = logits_sbv.shape[:2]
    values = _TokenValues.apply(
        logits_sbv.flatten(0, 1), labels.t().flatten(), request, getattr(output_layer, "tp_group", None)
    )
    losses_bs, entropy_bs = (each.view(sizes).t() for each in values)
    return TokenOutputs.of(torch.stack([losses_bs, entropy_bs]) if request.entropy else losses_bs, request)


class _TokenValues(torch.autograd.Function):
    """Cross entropies and entropies [n] of logits [n, V/t], of which every tensor rank has some columns.

    The backward overwrites what the forward has kept, so it can run only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_nv: torch.Tensor,
        labels_n: torch.Tensor,
        request: TokenRequest,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        exp_nv, columns, operations = logits_nv.clone(), logits_nv.shape[1], operations_for(logits_nv)
        statistics_4n, target_n, target_logit_n = operations.exponentiate_(
            exp_nv, labels_n, rank * columns, 1.0, 0.0, 0.0, request.temperature, entropy=True
        )
        gathered_r4n = statistics_4n[None]
        if size > 1:
            gathered_r4n = statistics_4n.new_empty(size, *statistics_4n.shape)
            dist.all_gather_into_tensor(gathered_r4n.flatten(0, 1), statistics_4n, group)
        total_4n = torch.empty_like(statistics_4n)
        operations.fold_(total_4n, gathered_r4n)
        total = GlobalStatistics(*total_4n.unbind())
        known = statistics_4n[MAX], target_n, target_logit_n, total, CROSS_ENTROPY, size * columns
        ctx.kept, ctx.request, ctx.labels_n = (exp_nv, Derivative(*known)), request, labels_n
        return total.token_loss(CROSS_ENTROPY), total.entropy_n

    @staticmethod
    def backward(ctx: Any, *gradients_n: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        if ctx.kept is None:
            raise RuntimeError("the backward of megatron_vp.token_log_probs ran twice, but it can run only once")
        (exp_nv, derivative), ctx.kept = ctx.kept, None
        wrong_n = ((ctx.labels_n < 0) | (ctx.labels_n >= derivative.vocab_size)) & (gradients_n[0] != 0)
        if wrong_n.any():
            raise outside_vocabulary(int(ctx.labels_n[wrong_n][0]), derivative.vocab_size)
        gradients_2n = torch.stack(gradients_n)
        check_entropies(gradients_2n, ctx.request)
        gradients_2n /= ctx.request.temperature
        operations_for(exp_nv).enter_derivative_(exp_nv, gradients_2n, derivative)
        return exp_nv, None, None, None
