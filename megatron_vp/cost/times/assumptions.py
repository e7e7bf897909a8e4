"""The assumptions that a prediction makes about settings that the job leaves open."""

from __future__ import annotations

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.shapes import AttentionKernels, Dispatcher, Job
from megatron_vp.cost.times.expert_times import is_flexible
from megatron_vp.jobs.layer_kind import LayerKind


def assumed(job: Job, hardware: Hardware) -> list[str]:
    """List the assumptions in words, each with the option that decides it."""
    found = []
    older = hardware.rates is not None and hardware.rates.flash_attention_2 is not None
    if job.attention is AttentionKernels.EITHER and older and job.layers is LayerKind.ENGINE:
        found.append(
            "attention takes half of FlashAttention 2's time and half of cuDNN 9's, as runs with delayed scaling used "
            "either; --attention-backend flash or fused decides"
        )
    if job.dispatcher is Dispatcher.UNSAID and job.expert > 1:
        kind = "flex" if is_flexible(job, hardware) else "alltoall"
        found.append(
            f"tokens travel to their experts by --moe-token-dispatcher-type {kind}, as published recipes set it; "
            "Megatron's default, allgather, moves more and is not counted"
        )
    return found
