"""Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core."""

import importlib
from typing import Any

__version__ = "0.1.0"


def enable(**settings: Any) -> Any:
    """Switch the plug-in on in a script or framework with a training loop of its own, before a model is built.

    It does what the flags do, for loops that call `megatron.core.pipeline_parallel.get_forward_backward_func`. Call it
    first in the script: it makes settings that must precede the import of Megatron.

    Args:
        settings: the values of our options, and of Megatron's where the model does not say them, by the names of their
            arguments: `vocab_parallel=True, pipeline_schedule="v-half"`.

    Returns:
        A handle. Its `disable()` undoes the call.

    Raises:
        UserError: for settings that cannot work, and for a Megatron that the patches do not fit.
    """
    # By name: nothing of Megatron or torch is imported with this package.
    return importlib.import_module("megatron_vp.mcore.start.enabled").enable(settings)


def whole_vocabulary(model: Any) -> Any:
    """Show embedding and output layer whole while a model is exported, converted or copied: a context manager.

    Inside, the first stage's rank has the embedding and the last stage's the output layer, under Megatron's names and
    as Megatron's own modules, each over that stage's tensor ranks; no other rank has either. Their weights are copies
    with the padded vocabulary's rows, collected from all ranks in blocks; they are released afterwards. What is written
    to them is lost, and the model cannot run inside. Where nothing is cut, as in plain Megatron, nothing happens.

    Collective over all ranks of the model. As any reader of weights, it wants gathered parameters: with
    overlap_param_gather, wait for them before, as Megatron does before it saves.

    Args:
        model: the model as Megatron keeps it, a list of this rank's chunks, wrapped or not; or the only chunk.
    """
    return importlib.import_module("megatron_vp.mcore.model.whole_vocabulary").whole_vocabulary(model)
