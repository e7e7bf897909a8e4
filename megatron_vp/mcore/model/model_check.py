"""Checks whether our schedules would run a script's own model as its author intended.

With --vocab-parallel, the decoder and embedding modules still run, but passes S and T replace Megatron's output layer
and loss. A model that overrides one of the replaced methods is refused, because the override would silently be skipped.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from torch import nn

from megatron_vp.errors import UserError

_LEFT_OUT = ("forward", "_preprocess", "_postprocess", "_scale_logits", "compute_language_model_loss")
"""Methods of Megatron's models that run only in part, or not at all, in a chunk whose vocabulary layers are split."""


_UNREAD = (
    "enable_autocast",
    "num_microbatches_with_partial_activation_checkpoints",
    "defer_embedding_wgrad_compute",
)
"""Fields of a model's configuration that only Megatron's own schedules read. A script may set them; no flag does."""


_SOFTCAP = "final_logit_softcapping"
"""The field of Megatron-Bridge's Gemma configuration that sets k in the logit softcap k tanh(logit / k)."""


_CAPPED = (
    "megatron.bridge.models.gemma.gemma2_provider.Gemma2OutputLayer",
    "megatron.bridge.models.gemma.modeling_gemma4.Gemma4OutputLayer",
)
"""The classes with which Megatron-Bridge extends Megatron's output layer to cap the logits."""


def check_model(chunk: nn.Module) -> None:
    """Raise UserError for a model that is neither a GPTModel nor a HybridModel, and for unsupported settings."""
    if not isinstance(chunk, GPTModel | HybridModel):
        raise UserError(
            f"the script built a {type(chunk).__name__}, but --vocab-parallel and --pipeline-schedule support only "
            "Megatron's language models: build a GPTModel or HybridModel, or leave both options out"
        )
    for name in _UNREAD:
        if getattr(chunk.config, name):
            raise UserError(
                f"the script's model configuration sets {name}, which only Megatron's own schedules read: leave it "
                "out, or leave --vocab-parallel and --pipeline-schedule out"
            )


def check_vocabulary_layers(chunk: nn.Module, label_smoothing: float = 0.0) -> None:
    """Check a chunk that has passed `check_model`, before its vocabulary layers are split.

    Raises UserError for methods, layers, biases and hooks that are not Megatron's own.
    """
    check_methods(chunk)
    if softcap_of(chunk.config) and label_smoothing:
        raise UserError(
            "--vocab-label-smoothing is not supported with a model that caps its logits: leave the option out"
        )
    if chunk.pre_process:
        _check_layer("embedding.word_embeddings", chunk.embedding.word_embeddings, VocabParallelEmbedding)
    if chunk.post_process:
        _check_layer("output_layer", chunk.output_layer, ColumnParallelLinear)
        if softcap_of(chunk.config) and type(chunk.output_layer) is ColumnParallelLinear:
            _refuse(f"the configuration sets {_SOFTCAP}, but the model's output layer does not apply it", "GPTModel")


def check_methods(chunk: nn.Module) -> None:
    """Raise UserError for methods in _LEFT_OUT that a subclass overrides, or that a script replaced. Scripts can do so
    on the class or on the model, before or after the model was built.
    """
    base = GPTModel if isinstance(chunk, GPTModel) else HybridModel
    for name in _LEFT_OUT:
        found = inspect.getattr_static(chunk, name, None)
        if found is not inspect.getattr_static(base, name, None):
            _refuse(f"{type(chunk).__name__} has its own {name}, parts of which would not run", base.__name__)
        if name == "forward":
            found = inspect.getattr_static(base, BEHIND_NEMO_RL, found)
        if found is not None and not _is_megatrons(found):
            _refuse(
                f"this script replaced {base.__name__}.{name}, and parts of the replacement would not run",
                f"own {name}, and compute from the token losses in the loss function",
            )


BEHIND_NEMO_RL = "_original_forward_for_linear_ce_fusion"
"""Where NeMo-RL keeps Megatron's `GPTModel.forward`. Its own calls Megatron's, except for one keyword.
"""

_MEGATRON = Path(inspect.getfile(GPTModel)).parents[2]


def _is_megatrons(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(_MEGATRON)


def softcap_of(config: Any) -> float:
    """Return k if the configuration caps logits to k tanh(logit / k), else 0."""
    return getattr(config, _SOFTCAP, None) or 0.0


def _check_layer(name: str, layer: nn.Module, expected: type[nn.Module]) -> None:
    extension, *others = type(layer).__bases__
    capped = f"{extension.__module__}.{extension.__qualname__}" in _CAPPED and others == [expected]
    if type(layer) is not expected and not capped:
        kind = type(layer)
        raise UserError(
            f"{name} is a {kind.__name__} of {kind.__module__}, but --vocab-parallel reads the rows of Megatron's own "
            "layer directly, and would skip an adapter or other behaviour: adapt only layers between the embedding and "
            "the output layer, or leave --vocab-parallel out"
        )
    if getattr(layer, "bias", None) is not None:
        _refuse(f"{name} has a bias, which would be ignored", f"{expected.__name__} without a bias")
    if layer._forward_hooks or layer._forward_pre_hooks:
        _refuse(f"{name} has a forward hook, which would not run", f"{expected.__name__} without hooks")


def _refuse(found: str, instead: str) -> NoReturn:
    raise UserError(
        f"--vocab-parallel with this model is not supported: {found}; use Megatron's {instead}, or leave "
        f"--vocab-parallel out"
    )
