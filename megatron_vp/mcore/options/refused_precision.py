"""fp8 and fp4 options that none of our schedules supports.

All layers except the vocabulary layers may compute in fp8 or fp4, and may keep their weights in that format. The
vocabulary layers stay in the model's dtype. docs/evidence/on_gpu.md says how each recipe was tested.
"""

from __future__ import annotations

import argparse
import os

from megatron.core.utils import is_te_min_version

from megatron_vp.mcore.options.refused_options import RefusedOption

UNSAFE_STATE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""The environment variable that lets Transformer Engine load the state of delayed scaling."""
FIRST_WITHOUT_PICKLES = "2.16.1"
"""The first version of Transformer Engine that refuses to load this state unless the variable is 1."""


def describe_precision(a: argparse.Namespace) -> str | None:
    """Describe which parts of an accepted job compute in fp8 or fp4, and how this was tested; None if no part does."""
    if not (a.fp8 or a.fp4):
        return None
    vocabulary = "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32"
    layers = "the other layers and their weights" if a.fp8_param_gather or a.fp4_param_gather else "the other layers"
    if a.fp4:
        # In fp4, gradients are rounded with random numbers, which depend on the order of passes.
        return (
            f"{vocabulary} in the vocabulary layers, fp4 ({a.fp4_recipe}) in {layers}: tested only on CPU, without "
            "the fp4 kernels; losses differ between schedules, because gradients are rounded stochastically"
        )
    return (
        f"{vocabulary} in the vocabulary layers, fp8 ({a.fp8_recipe}) in {layers}: tested only on CPU, without the fp8 "
        "kernels"
    )


def cannot_resume(a: argparse.Namespace) -> bool:
    """Whether Transformer Engine would refuse to load the delayed-scaling state in this job's checkpoints."""
    checkpoints = a.save is not None or a.load is not None
    guarded = is_te_min_version(FIRST_WITHOUT_PICKLES) and os.environ.get(UNSAFE_STATE) != "1"
    return bool(a.fp8) and a.fp8_recipe == "delayed" and checkpoints and guarded


def _counts_recomputed_regions(a: argparse.Namespace) -> bool:
    """Whether Transformer Engine would match recomputed regions with the wrong forward passes, because it counts these
    regions per process, over all chunks.
    """
    delayed = a.fp8 and a.fp8_recipe == "delayed"
    chunks = a.virtual_pipeline_model_parallel_size or 1
    return delayed and a.recompute_granularity is not None and chunks > 1 and not _chunks_are_alike(a)


def _chunks_are_alike(a: argparse.Namespace) -> bool:
    """Whether every chunk has the same number of layers."""
    if a.hybrid_layer_pattern is not None or a.mtp_num_layers:
        return False
    if a.pipeline_model_parallel_layout is None:
        return True  # Megatron divides the layers evenly, or refuses the arguments.
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout(a.pipeline_model_parallel_layout, a.pipeline_model_parallel_size)
    return len({chunk.count(LayerType.decoder) for rank in layout.layout for chunk in rank}) == 1


REFUSED_PRECISION = (
    RefusedOption(
        "--fp4-recipe custom",
        lambda a: a.fp4 and a.fp4_recipe == "custom",
        "custom quantizers may keep state that depends on the order of passes",
        "use --fp4-recipe nvfp4",
    ),
    RefusedOption(
        "--fp8-output-proj",
        lambda a: a.fp8_output_proj,
        "the output layer computes in the model's dtype, because Transformer Engine's fp8 output layer cannot leave "
        "its weight gradient to a separate pass",
    ),
    RefusedOption(
        "--fp8-recipe custom",
        lambda a: a.fp8 and a.fp8_recipe == "custom",
        "custom quantizers may keep state that depends on the order of passes",
        "use --fp8-recipe tensorwise, delayed, blockwise or mxfp8",
    ),
    RefusedOption(
        "--te-precision-config-file",
        lambda a: a.te_precision_config_file,
        "for individual layers, the file may select formats that our schedules do not support",
        "choose one format for all layers with --fp8-format and --fp8-recipe",
    ),
    RefusedOption(
        "--fp8-recipe delayed, recomputation and different numbers of layers per chunk",
        _counts_recomputed_regions,
        "Transformer Engine counts recomputed regions per process instead of per chunk, so scaling factors would be "
        "updated in the wrong backward pass",
        "use another --fp8-recipe, give every chunk the same number of layers or leave --recompute-granularity out",
    ),
)
