"""Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core."""

import importlib
from typing import Any

__version__ = "0.1.0"


def enable(**settings: Any) -> Any:
    """Switch the plug-in on in a script or framework with a training loop of its own, before a model is built.

    It does what the flags do, for loops that call `megatron.core.pipeline_parallel.get_forward_backward_func`. Put it
    first in the script: it sets what must stand before Megatron is imported.

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
