"""Sequence parallelism for pass W: joins the tensor ranks' parts of a layer's input, or extracts this rank's part."""

from __future__ import annotations

import torch
import torch.distributed as dist


def whole_sequence(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Join the tensor ranks' parts of a sequence along the first dimension; without a group, return `part` itself."""
    if group is None:
        return part
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group)
    return whole


def own_part(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Copy this rank's part out of a joined sequence."""
    return whole.chunk(group.size())[group.rank()].clone()
