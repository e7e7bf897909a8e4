"""Lists the assumptions that a prediction makes about settings that the job leaves open."""

from __future__ import annotations

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.jobs.layer_kind import LayerKind


def assumed(job: Job, hardware: Hardware) -> list[str]:
    """List the assumptions as text, with the option that would make it unnecessary, if there is one."""
    found = []
    older = hardware.rates is not None and hardware.rates.flash_attention_2 is not None
    if 0 < job.flash_attention_2 < 1 and older and job.layers is LayerKind.ENGINE:
        found.append(
            "attention time is the mean of the times of FlashAttention 2 and cuDNN 9, because published runs with "
            "delayed scaling used one or the other; choose one with --attention-backend flash or fused"
        )
    if not job.dispatcher and job.expert > 1:
        kind = "flex" if job.is_flexible else "alltoall"
        found.append(
            f"--moe-token-dispatcher-type is {kind}, as in published recipes; the prediction does not cover Megatron's "
            "default, allgather, which moves more data"
        )
    if job.graphs in ("local", "transformer_engine"):
        found.append(
            f"--cuda-graph-impl {job.graphs} saves no time, because GPUs are assumed never to wait for launches, and "
            "its static buffers take no memory"
        )
    if job.offloaded_modules:
        found.append("copies of --fine-grained-activation-offloading are hidden behind the passes")
    return found
