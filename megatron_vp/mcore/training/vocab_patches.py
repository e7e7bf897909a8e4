"""Patches for our pipeline schedules and for vocabulary parallelism."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_vp.mcore.patches import Patch


def _lazy(module: str, name: str) -> Callable[[Any], Any]:
    """Make a replacement with a function of `megatron_vp.mcore`, imported only when the patch is applied."""
    return lambda original: getattr(importlib.import_module(f"megatron_vp.mcore.{module}"), name)(original)


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_schedule(**arguments: Any) -> Any:
        from megatron_vp.mcore.training.forward_backward import forward_backward

        return forward_backward(**arguments)

    return run_schedule


SCHEDULE_PATCHES: tuple[Patch, ...] = (
    # Patch the schedule functions themselves, not `get_forward_backward_func`: training loops have already imported
    # that function, which looks up the schedule functions by name.
    *(
        Patch(
            f"megatron.core.pipeline_parallel.schedules:forward_backward_{name}",
            _schedule,
            "run the schedule that --pipeline-schedule names, in training and in evaluation",
        )
        for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
    ),
    *(
        Patch(
            f"megatron.training.models.{module}:unimodal_build_distributed_models",
            _lazy("model.preparation", "building"),
            "place the layers of models that Megatron's builders make, and shard the vocabulary layers after all hooks",
        )
        for module in ("gpt", "hybrid")
    ),
    Patch(
        "megatron.training.training:get_model",
        _lazy("model.preparation", "getting_model"),
        "place or shard the vocabulary layers of models that a script's model_provider makes",
    ),
    Patch(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        _lazy("model.preparation", "wrapping"),
        "shard the vocabulary layers of a script's own models, and let pass W report its weight gradients",
    ),
    Patch(
        "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
        _lazy("training.loss_check", "deferring"),
        "check losses and gradients only at the end of an iteration, because each check makes the host wait for the "
        "device",
    ),
    Patch(
        "megatron.core.transformer.cuda_graphs:TECudaGraphHelper._get_cuda_graph_input_data",
        _lazy("training.forward_backward", "in_our_order"),
        "capture the CUDA graphs of layers in the order of the schedule's passes, because these graphs share buffers",
    ),
)
"""Patches that are applied with --vocab-parallel or a --pipeline-schedule other than 1f1b."""

PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.core.models.common.language_module.language_module:LanguageModule._is_in_embd_group",
        lambda original: lambda self: False,
        "skip Megatron's synchronization of word embeddings at startup, because no rank has the whole embedding",
    ),
    Patch(
        "megatron.core.transformer.multi_token_prediction:_compute_mtp_acceptance_counts",
        _lazy("model.multi_token", "counting_argmax"),
        "count the accepted predictions of MTP heads from softmax statistics, because no rank has all logits",
    ),
)
"""Patches that are applied with --vocab-parallel."""
