"""Runs a chunk's forward, its backward, or a forward and another microbatch's backward as one, by Megatron's own plans.

Megatron cuts every layer into nodes, and the autograd graph between them. Dispatch and combine run on a stream for
communication, so that the nodes of one pass hide behind those of the other:

    communication:  combine of B       dispatch of F, then of B       combine of F
    computation:    attention of F     experts of B, W, then of F     attention of B, W

The order is that of Megatron's `TransformerModelChunkSchedulePlan.run`, which runs here. Our chunks need nothing of
what it does before and behind layers: vocabulary passes and the loss are instructions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel.utils import ScheduleNode, get_comp_stream, set_streams
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_vp.runtime.streams import hand_over

Plan = TransformerModelChunkSchedulePlan
"""The nodes of a chunk for one microbatch: made by its forward, used up by its backward."""


def plan_of(core: Any, *args: Any, **kwargs: Any) -> Plan:
    """Make the plan of a chunk's call."""
    set_streams(high_priority=core.config.high_priority_a2a_comm_stream)
    plan = core.build_schedule_plan(*args, **kwargs)
    if hasattr(core, "received_embedding"):
        # The MTP block reads its rows from `model.embedding`; here, other ranks have looked them up.
        plan.state.model = SimpleNamespace(
            decoder=core.decoder, vp_stage=core.vp_stage, embedding=core.received_embedding
        )
        plan.state.input_ids = plan.state.position_ids = None
    layers, norm = core.decoder.layers, core.decoder.final_layernorm
    # Megatron applies the decoder's final norm when it combines tokens, which a dense layer does not do.
    if norm is not None and len(layers) and not isinstance(layers[-1].mlp, MoELayer):
        plan.get_layer(len(layers) - 1).moe_combine = _norm_node(norm, plan)
    elif norm is not None and not len(layers) and plan.post_process is None:
        plan.post_process = _norm_node(norm, plan)
    return plan


def _norm_node(norm: torch.nn.Module, plan: Plan) -> ScheduleNode:
    return ScheduleNode(norm, get_comp_stream, plan.event, name="final_norm")


def run_plans(
    forward: Plan | None,
    backward: Plan | None = None,
    gradient: torch.Tensor | None = None,
    weight_gradients: Callable[[], None] | None = None,
) -> torch.Tensor | None:
    """Run a forward, a backward whose output has `gradient`, or both as one. Return the forward's output.

    `weight_gradients` computes the weight gradients that the backward has left so far. It is called where Megatron
    delays weight gradients to: while the forward's tokens are on their way, and behind each layer but the last.
    """
    if backward is not None and weight_gradients is not None:
        for index in range(backward.num_layers()):
            layer = backward.get_layer(index)
            layer.mlp.backward_dw = weight_gradients
            layer.pre_dispatch_computation.backward_dw = weight_gradients if index else _nothing
    output = Plan.run(forward, backward, b_grad=gradient)
    if output is not None:
        hand_over(output)
    return output


def _nothing() -> None:
    """Leave the weight gradients of the layer that is computed last to pass W, behind the messages."""
