"""Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core."""

import importlib
from typing import Any

__version__ = "0.1.0"


def enable(**settings: Any) -> Any:
    """Turn on the plug-in in a script or framework that has its own training loop.

    The settings have the same effect as the flags on the command line, in any training loop that calls
    `megatron.core.pipeline_parallel.get_forward_backward_func`. Call `enable` at the top of the script, because it
    changes settings that must be in place before Megatron is imported.

    Args:
        settings: values for this plug-in's options, and for any Megatron options that the model does not determine, as
            keyword arguments named like the options: `vocab_parallel=True, pipeline_schedule="v-half"`.

    Returns:
        A handle whose method `disable()` undoes this call.

    Raises:
        UserError: if the settings cannot work, or if the patches do not fit the installed Megatron.
    """
    # Import the module only when called, so that importing this package loads neither Megatron nor torch.
    return importlib.import_module("megatron_vp.mcore.start.enabled").enable(settings)


def whole_vocabulary(model: Any) -> Any:
    """Context manager that gives a model its complete embedding and output layer, for export or conversion.

    Inside the context, only the ranks of the first stage have an embedding, and only the ranks of the last stage have
    an output layer. These layers are Megatron's own modules under Megatron's names, split only over the tensor ranks of
    the stage. The weights of these layers are copies of all rows of the padded vocabulary, collected from all ranks and
    released when the context ends. Changes to these copies are lost, and the model cannot run inside the context.
    Without vocabulary parallelism, the context changes nothing.

    All ranks of the model must enter the context together. With `overlap_param_gather`, first wait until all parameters
    are gathered, as Megatron does before it saves a checkpoint.

    Args:
        model: this rank's model chunks, wrapped or not, as a list; a single chunk may also be given without a list.
    """
    return importlib.import_module("megatron_vp.mcore.model.whole_vocabulary").whole_vocabulary(model)
