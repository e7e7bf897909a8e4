"""Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core."""

import importlib
from typing import Any

__version__ = "0.1.0"


def enable(**settings: Any) -> Any:
    """Turn on the plug-in in a script or framework that has its own training loop; call this before a model is built.

    It has the same effect as the flags on the command line, for training loops that call
    `megatron.core.pipeline_parallel.get_forward_backward_func`. Call it at the top of the script, because it changes
    settings that must be in place before Megatron is imported.

    Args:
        settings: values for this plug-in's options, and for any Megatron options that the model does not determine, as
            keyword arguments named like the options: `vocab_parallel=True, pipeline_schedule="v-half"`.

    Returns:
        A handle. Its `disable()` undoes the call.

    Raises:
        UserError: if the settings cannot work, or if the patches do not fit the installed Megatron.
    """
    # Imported by name, so that importing this package imports neither Megatron nor torch.
    return importlib.import_module("megatron_vp.mcore.start.enabled").enable(settings)


def whole_vocabulary(model: Any) -> Any:
    """Give a model its whole embedding and output layer while it is exported, converted or copied (a context manager).

    Inside the context, the ranks of the first stage hold the embedding, and the ranks of the last stage hold the output
    layer. Both are Megatron's own modules under Megatron's names, split only over the tensor ranks of their stage. No
    other rank holds either. Their weights are copies of all rows of the padded vocabulary, collected from all ranks and
    released at the end. Changes to these copies are lost, and the model cannot run inside the context. If the
    vocabulary is not split, as in plain Megatron, nothing happens.

    All ranks of the model must enter the context together. Like any code that reads weights, it needs
    gathered parameters: with `overlap_param_gather`, first wait for the gathers, as Megatron does before it saves a
    checkpoint.

    Args:
        model: the list of this rank's model chunks as Megatron keeps it, wrapped or not. A single chunk needs no list.
    """
    return importlib.import_module("megatron_vp.mcore.model.whole_vocabulary").whole_vocabulary(model)
