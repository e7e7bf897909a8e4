"""Eight operations that S, T, IB, TOKENS and C1 use, in plain PyTorch; `kernels` has GPU versions of most, and
`operations_for` chooses the version.

The plain versions are used on CPUs and for fp64, and define the results of the kernels. Tests compare both versions
with fp64 results.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.vocab.loss import LINEAR, LOWEST, MAX, SUM, TILT, Derivative, smallest_scale, statistics_dtype

ADDS_INTO_FP32 = torch.__version__ >= "2.10"
"""Whether `addmm` can add a product of 16-bit factors to an fp32 matrix. In PyTorch 2.8 and 2.9, it has an argument
`out_dtype`, but rejects this combination of dtypes.
"""

ROWS_PER_BLOCK = 1024
"""Number of tokens whose logits are widened to fp32 at once, in copies of at most 4 * ROWS_PER_BLOCK * V/p bytes."""


class EagerOperations:
    """Operations for any device and float dtype, which write into their first argument. Except for `sort_by_owner_`,
    they may block the host.
    """

    def exponentiate_(
        self,
        logits_nv: torch.Tensor,
        labels_n: torch.Tensor,
        first: int,
        target_weight: float,
        logit_weight: float = 0.0,
        softcap: float = 0.0,
        temperature: float = 1.0,
        *,
        entropy: bool = False,
        slope: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Turn logits into E = exp(logit - row maximum), and set the target's entry to zero.

        With a softcap k, a logit y is first capped to k tanh(y / k). The stored E is then multiplied by the slope 1 -
        tanh(y / k)^2, which gradients need.

        Args:
            logits_nv: [n, V/p], V/p >= 1. Overwritten.
            labels_n: global token ids, int64 [n].
            first: the token of column 0.
            target_weight: t, the weight of the target's logit in the loss.
            logit_weight: u, the weight of every logit in the loss; 0 with a softcap.
            softcap: k; 0 leaves logits as they are.
            temperature: divides the logits after a softcap; 1 unless t = 1 and u = 0.
            entropy: whether to add the statistic w of the entropy; only if t = 1 and u = 0.
            slope: whether a softcap's slope multiplies E.

        Returns:
            Three tensors: the packed statistics [3, n], or [4, n] with `entropy`, the target's column (int64 [n]), and
            the target's logit z [n], capped and divided by the temperature, as are all logits of the statistics. If the
            target belongs to another shard, the column is -1 and z is 0. The statistics of a token are the maximum a of
            its logits, the sum l of exp(logit - a) over all columns (without the softcap's slope), t z + u * (sum of
            its logits), and w. Floats are in fp32, or in fp64 if the logits are.
        """
        tokens, columns = logits_nv.shape
        local_n = labels_n - first
        target_n = torch.where((local_n >= 0) & (local_n < columns), local_n, -1)
        statistics_3n = logits_nv.new_empty((3 + entropy, tokens), dtype=statistics_dtype(logits_nv.dtype))
        target_logit_n = torch.empty_like(statistics_3n[LINEAR])
        for start in range(0, tokens, ROWS_PER_BLOCK):
            span = slice(start, start + ROWS_PER_BLOCK)
            logits, column, owned = logits_nv[span], target_n[span].clamp(0)[:, None], target_n[span] >= 0
            wide, factor = logits.to(statistics_3n.dtype), None
            if softcap:
                wide.div_(softcap).tanh_()
                factor = 1 - wide.square() if slope else None
                wide.mul_(softcap)
            largest = wide.amax(-1)
            statistics_3n[MAX, span] = largest / temperature
            target_logit_n[span] = torch.where(owned, wide.gather(-1, column).squeeze(-1), 0) / temperature
            statistics_3n[LINEAR, span] = target_weight * target_logit_n[span]
            if logit_weight:
                statistics_3n[LINEAR, span] += logit_weight * wide.sum(-1)
            wide.sub_(largest[:, None])
            if temperature != 1:
                wide.div_(temperature)
            below = wide.clamp(min=LOWEST) if entropy else None
            wide.exp_()
            statistics_3n[SUM, span] = wide.sum(-1)
            if below is not None:
                statistics_3n[TILT, span] = below.mul_(wide).sum(-1)
            if factor is not None:
                wide.mul_(factor)
            kept = torch.where(owned, 0, wide.gather(-1, column).squeeze(-1))
            wide.scatter_(-1, column, kept[:, None])
            if wide is not logits:
                logits.copy_(wide)
        return statistics_3n, target_n, target_logit_n

    def fold_(self, total_3n: torch.Tensor, gathered_r3n: torch.Tensor) -> None:
        """Fold the packed statistics [shards, 3 or 4, n] of several shards, in shard order, into the joint `total_3n`.

        An empty shard (a = -inf, others 0) changes nothing; several empty shards fold into an empty shard.
        """
        max_rn, sum_rn, linear_rn = gathered_r3n[:, :TILT].unbind(1)
        max_n, sum_n, linear_n = total_3n[:TILT].unbind()
        torch.amax(max_rn, 0, out=max_n)
        # If all shards are empty, `max_n` is -inf, and the difference of two infinities would be NaN.
        finite_n = max_n.clamp(min=torch.finfo(max_n.dtype).min)
        torch.sum(sum_rn * torch.exp(max_rn - finite_n), 0, out=sum_n)
        torch.sum(linear_rn, 0, out=linear_n)
        if len(total_3n) > TILT:
            below_rn = (max_rn - finite_n).clamp(min=LOWEST)
            moved_rn = gathered_r3n[:, TILT] + below_rn * sum_rn
            torch.sum(moved_rn * below_rn.exp(), 0, out=total_3n[TILT])

    def rescale_(self, product_nh: torch.Tensor, weight_vh: torch.Tensor, derivative: Derivative) -> None:
        """Turn E W into (D + u) W: row i becomes c_i (E W)_i + e_i W[target_i], rounded once."""
        scaled_nh = product_nh * derivative.scale_n[:, None]
        owned_n = (derivative.target_n >= 0).nonzero().squeeze(-1)
        scaled_nh[owned_n] += weight_vh[derivative.target_n[owned_n]] * derivative.entry_n[owned_n, None]
        product_nh.copy_(scaled_nh)

    def enter_targets_(
        self, exp_nv: torch.Tensor, x_nh: torch.Tensor, token_loss_grad_n: torch.Tensor, derivative: Derivative
    ) -> torch.Tensor:
        """Turn E into E' by entering the targets' entries; return X' such that E'^T X' = (D + u)^T (g X).

        Each row of X' is c g times the row of X, and the target's entry of E' is e / c; both are rounded once. If this
        shard owns a row's target and the row's c is less than `smallest_scale`, c multiplies the row of E instead: the
        target's entry of E' is then e, and the row of X' is g times the row of X.
        """
        scale_n, owned_n = derivative.scale_n, derivative.target_n >= 0
        taken_n = owned_n & (scale_n.abs() < smallest_scale(exp_nv.dtype))
        rows_k = taken_n.nonzero().squeeze(-1)
        exp_nv[rows_k] = (exp_nv[rows_k] * scale_n[rows_k, None]).to(exp_nv.dtype)
        left_n = torch.where(taken_n, 1, scale_n)
        column = derivative.target_n.clamp(0)[:, None]
        entry = torch.where(owned_n, derivative.entry_n / left_n, exp_nv.gather(-1, column).squeeze(-1))
        exp_nv.scatter_(-1, column, entry[:, None].to(exp_nv.dtype))
        return (x_nh * (left_n * token_loss_grad_n)[:, None]).to(x_nh.dtype)

    def enter_derivative_(self, exp_nv: torch.Tensor, gradients_2n: torch.Tensor, derivative: Derivative) -> None:
        """Turn E into the derivative of the training loss with respect to the logits, rounded once.

        `gradients_2n` holds g and h, the gradients with respect to each token's cross entropy and entropy. E must not
        have been multiplied by a softcap's slope.
        """
        total, z_n = derivative.total, derivative.target_logit_n
        g_n, h_n = gradients_2n
        owned_n, columns = derivative.target_n >= 0, derivative.target_n.clamp(0)
        entry_n = total.probability(z_n) * (g_n + h_n * (total.mean_n + (total.max_n - z_n))) - g_n
        if derivative.softcap:
            entry_n = entry_n * (1 - (z_n / derivative.softcap).square())
        scale_n, mean_n = total.probability(derivative.largest_n), total.mean_n + (total.max_n - derivative.largest_n)
        for start in range(0, len(exp_nv), ROWS_PER_BLOCK):
            span = slice(start, start + ROWS_PER_BLOCK)
            wide, column = exp_nv[span].to(scale_n.dtype), columns[span, None]
            below = wide.log().clamp_(min=LOWEST)
            wide = wide * (g_n[span, None] + h_n[span, None] * (mean_n[span, None] - below)) * scale_n[span, None]
            if derivative.softcap:
                wide.mul_(1 - (below.add_(derivative.largest_n[span, None]) / derivative.softcap).square())
            kept = torch.where(owned_n[span], entry_n[span], wide.gather(-1, column).squeeze(-1))
            exp_nv[span] = wide.scatter_(-1, column, kept[:, None]).to(exp_nv.dtype)

    def add_product_(self, matrix_vh: torch.Tensor, left_nv: torch.Tensor, right_nh: torch.Tensor) -> None:
        """Compute matrix += left^T right."""
        if matrix_vh.dtype == left_nv.dtype:
            matrix_vh.addmm_(left_nv.t(), right_nh)
        else:
            matrix_vh.add_(left_nv.t() @ right_nh)

    def add_rows_(
        self, matrix_vh: torch.Tensor, row_n: torch.Tensor, source_nh: torch.Tensor, *, sorted_rows: bool = False
    ) -> None:
        """Compute matrix[row_i] += source_i for all non-negative row indices. The result is bitwise reproducible.

        sorted_rows: whether `row_n` is in ascending order.
        """
        kept_n = (row_n >= 0).nonzero().squeeze(-1)
        rows_kh = source_nh[kept_n].to(matrix_vh.dtype)
        # On a GPU, `index_add_` adds rows in an order that can vary between runs. `index_put_` sorts the indices first.
        if matrix_vh.is_cuda:
            matrix_vh.index_put_((row_n[kept_n],), rows_kh, accumulate=True)
        else:
            matrix_vh.index_add_(0, row_n[kept_n], rows_kh)

    def sort_by_owner_(
        self, order_n: torch.Tensor, counts: torch.Tensor, tokens_n: torch.Tensor, spans: torch.Tensor, vocab_size: int
    ) -> None:
        """Sort the positions of a microbatch stably by key, and count the positions of every owner.

        The key of a position is the token id if a shard of this pipeline owns the token, and V plus the token id if
        another pipeline's shard owns the token. If the id is outside the vocabulary, the key is 2 V plus the nearest
        valid id.

        Args:
            order_n: int64 [n], the sorted positions.
            counts: int64 [p + 2], the number of positions of each pipeline rank, of other pipelines, and of invalid
                tokens.
            tokens_n: int64 [n].
            spans: int64 [2, p + 2], for each entry of `counts`, the start and the exclusive end of its range of keys.
            vocab_size: V.
        """
        first, beyond = spans[:, :-2]
        word_n = tokens_n.clamp(0, vocab_size - 1)
        shard_n = (torch.bucketize(word_n, first, right=True) - 1).clamp_(0)
        owned_n = (word_n >= first[shard_n]) & (word_n < beyond[shard_n])
        # The key is the nearest valid id plus 0 (this pipeline owns the id), V (another pipeline owns it) or 2 V (the
        # id is invalid).
        key_n = word_n + vocab_size * torch.where(word_n == tokens_n, 1 - owned_n.long(), 2)
        sorted_n, sorted_order_n = key_n.sort(stable=True)
        order_n.copy_(sorted_order_n)
        counts.copy_(torch.searchsorted(sorted_n, spans).diff(dim=0)[0])


class ShapeOperations(EagerOperations):
    """Operations for fake tensors; they allocate the same tensors as the Triton kernels but compute nothing."""

    def exponentiate_(
        self, logits_nv: torch.Tensor, labels_n: torch.Tensor, *others: float, entropy: bool = False, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `EagerOperations`."""
        dtype, rows = statistics_dtype(logits_nv.dtype), ((3 + entropy,), ())
        statistics_3n, target_logit_n = (logits_nv.new_empty(*each, len(logits_nv), dtype=dtype) for each in rows)
        return statistics_3n, torch.empty_like(labels_n), target_logit_n

    def enter_targets_(self, exp_nv: torch.Tensor, x_nh: torch.Tensor, *others: object) -> torch.Tensor:
        """See `EagerOperations`."""
        return torch.empty_like(x_nh)

    def _nothing(self, *others: Any, **named: Any) -> None:
        """See `EagerOperations`."""

    fold_ = rescale_ = enter_derivative_ = add_product_ = add_rows_ = sort_by_owner_ = _nothing


def operations_for(tensor: torch.Tensor) -> EagerOperations:
    """Choose the operations by the type, device and dtype of a tensor."""
    if isinstance(tensor, FakeTensor):
        return _SHAPES
    return fused_operations() if tensor.is_cuda and tensor.dtype != torch.float64 else _EAGER


_EAGER = EagerOperations()
_SHAPES = ShapeOperations()


@cache
def fused_operations() -> EagerOperations:
    """The operations that use Triton kernels and cuBLAS, run on GPUs and never wait for the device."""
    if importlib.util.find_spec("triton") is None:
        return _EAGER
    from megatron_vp.vocab.kernels import gradient_rows, rows, softmax  # imports Triton

    class FusedOperations(EagerOperations):
        exponentiate_ = staticmethod(softmax.exponentiate_)
        fold_ = staticmethod(softmax.fold_)
        rescale_ = staticmethod(gradient_rows.rescale_)
        enter_targets_ = staticmethod(gradient_rows.enter_targets_)
        enter_derivative_ = staticmethod(gradient_rows.enter_derivative_)
        add_rows_ = staticmethod(rows.add_rows_)

        def add_product_(self, matrix_vh: torch.Tensor, left_nv: torch.Tensor, right_nh: torch.Tensor) -> None:
            # Since PyTorch 2.10, 16-bit products are not rounded before they are added in fp32.
            if matrix_vh.dtype == torch.float32 != left_nv.dtype and ADDS_INTO_FP32:
                torch.addmm(matrix_vh, left_nv.t(), right_nh, out_dtype=torch.float32, out=matrix_vh)
            else:
                super().add_product_(matrix_vh, left_nv, right_nh)

    return FusedOperations()


def main_grad(weight: nn.Parameter) -> torch.Tensor:
    """Megatron's buffer for gradients of `weight`; it has the weight's shape and any float dtype."""
    return weight.main_grad  # type: ignore[attr-defined]
