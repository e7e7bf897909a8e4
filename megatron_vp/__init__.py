"""Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`token_log_probs`, `TokenRequest` and `TokenOutputs`, whose module imports torch, so it is imported when used."""
    if name in ("token_log_probs", "TokenRequest", "TokenOutputs"):
        module: Any = importlib.import_module("megatron_vp.mcore.training.token_outputs")
        module.taken = True
        return getattr(module, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


def enable(**settings: Any) -> Any:
    """Turn on the plug-in in a script or framework that has its own training loop.

    The settings have the same effect as command-line flags. They apply to every training loop that calls
    `megatron.core.pipeline_parallel.get_forward_backward_func`. Call `enable` at the top of the script, because it
    changes settings that must be in place before Megatron is imported.

    Args:
        settings: one keyword argument per option, named like the option: `vocab_parallel=True,
            pipeline_schedule="v-half"`. Megatron's own options are also accepted. In a script that does not let
            Megatron parse arguments, the model's configuration overrides Megatron's options.

    Returns:
        A handle whose method `disable()` undoes this call.

    Raises:
        UserError: if a setting is invalid, or if the patches do not fit the installed Megatron.
    """
    # Import the module only when called, so that importing this package loads neither Megatron nor torch.
    return importlib.import_module("megatron_vp.mcore.start.enabled").enable(settings)


def whole_vocabulary(model: Any, write: bool = False) -> Any:
    """Context manager that gives a model its complete embedding and output layer, for export, loading or conversion.

    Inside the context, only the ranks of the first stage have an embedding, and only the ranks of the last stage have
    an output layer. The two layers are Megatron's own modules with Megatron's parameter names, each split only over the
    tensor ranks of its stage. Their weights are copies of all rows of the padded vocabulary, collected from all ranks
    and released when the context ends. The model cannot run inside the context. Without vocabulary parallelism, the
    context changes nothing.

    All ranks of the model must enter the context together. With `overlap_param_gather`, callers must first wait until
    all parameters are gathered, as Megatron does before it saves a checkpoint.

    Args:
        model: the list of this rank's model chunks, or a single chunk, with or without wrappers such as DDP.
        write: whether changed weights are written to the model's own when the context ends; of tied weights, the
            embedding. An optimizer with fp32 copies must then read them (`optimizer.reload_model_params()`), as
            always when a model's weights change.
    """
    return importlib.import_module("megatron_vp.mcore.model.whole_vocabulary").whole_vocabulary(model, write)
