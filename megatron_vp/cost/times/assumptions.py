"""Lists the assumptions that a prediction makes about settings that the job leaves open."""

from __future__ import annotations

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.shapes import AttentionKernels, Dispatcher, Job
from megatron_vp.jobs.layer_kind import LayerKind


def assumed(job: Job, hardware: Hardware) -> list[str]:
    """List the assumptions as text, each with the option that would make it unnecessary."""
    found = []
    older = hardware.rates is not None and hardware.rates.flash_attention_2 is not None
    if job.attention is AttentionKernels.EITHER and older and job.layers is LayerKind.ENGINE:
        found.append(
            "attention time is the mean of the times of FlashAttention 2 and cuDNN 9, because published runs with "
            "delayed scaling used one or the other; choose one with --attention-backend flash or fused"
        )
    if job.dispatcher is Dispatcher.UNSAID and job.expert > 1:
        kind = "flex" if job.is_flexible else "alltoall"
        found.append(
            f"--moe-token-dispatcher-type is {kind}, as in published recipes; the prediction does not cover Megatron's "
            "default, allgather, which moves more data"
        )
    return found
