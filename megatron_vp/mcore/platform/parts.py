"""Names the package that implements each part of a job: Transformer Engine, Apex, PyTorch or this plug-in."""

from __future__ import annotations

from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.platform.installed import Installed

TITLES = {
    "te": "Transformer Engine",
    "local": "Megatron's local layers",
    "apex": "Apex",
    "torch": "PyTorch",
    "megatron_vp": "megatron_vp",
    "unfused": "PyTorch, with a separate addition to main_grad",
}


def parts_of_job(args: Arguments, machine: Installed, w_is_ours: bool) -> dict[str, str]:
    """Return which implementation (a key of TITLES) the job uses for layers, norms, softmax, accumulation of weight
    gradients, and the optimizer step.

    `w_is_ours` says whether a pass W computes the weight gradients of local layers.
    """
    local = args.transformer_impl == "local"
    return {
        "layers": "local" if local else "te",
        "norm": _norm(args, machine) if local else "te",
        "softmax": _softmax(args, machine) if local else "te",
        "accumulation": _accumulation(args, machine, w_is_ours),
        "optimizer": "te" if machine.engine else "apex" if machine.apex else "torch",
    }


def describe(parts: dict[str, str]) -> str:
    """Describe in one line what implements each part."""
    return "; ".join(f"{part}: {TITLES[who]}" for part, who in parts.items())


def _norm(args: Arguments, machine: Installed) -> str:
    return "apex" if machine.apex and args.normalization == "LayerNorm" else "torch"


def _softmax(args: Arguments, machine: Installed) -> str:
    fused = args.masked_softmax_fusion and args.core_attention == "megatron" and (args.bf16 or args.fp16)
    return "apex" if fused and machine.apex_softmax else "torch"


def _accumulation(args: Arguments, machine: Installed, w_is_ours: bool) -> str:
    if args.transformer_impl == "local" and w_is_ours:
        return "megatron_vp"
    if not args.gradient_accumulation_fusion:
        return "unfused"
    if args.transformer_impl != "local":
        return "te"
    return "apex" if machine.apex_accumulation else "megatron_vp"
