"""Freeze parameters of a model, or freeze all parameters and add adapters, for jobs that train only a part of it.

These are hooks on the finished chunks of a rank, which run before Megatron wraps the chunks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

VOCABULARY = ("word_embeddings", "output_layer")


def vocabulary(chunks: list) -> list:
    """Freeze both vocabulary layers."""
    return _freeze(chunks, lambda name, layer: any(part in name for part in VOCABULARY))


def embedding(chunks: list) -> list:
    """Freeze the word embedding alone."""
    return _freeze(chunks, lambda name, layer: VOCABULARY[0] in name)


def output_layer(chunks: list) -> list:
    """Freeze the output layer alone."""
    return _freeze(chunks, lambda name, layer: VOCABULARY[1] in name)


def all_but_projection(chunks: list) -> list:
    """Train what leaves attention, and nothing else."""
    return _freeze(chunks, lambda name, layer: "linear_proj" not in name)


def every_other_layer(chunks: list) -> list:
    """Freeze the vocabulary layers and every other layer; of the rest single weights and a single bias."""

    def is_frozen(name: str, layer: int | None) -> bool:
        if layer is None:
            return any(part in name for part in VOCABULARY)
        return layer % 2 == 0 or name.endswith(("linear_fc2.weight", "linear_fc1.bias"))

    return _freeze(chunks, is_frozen)


def first_layers(chunks: list) -> list:
    """Freeze the vocabulary layers and all of the first half of four layers: some ranks train nothing."""
    return _freeze(chunks, lambda name, layer: any(part in name for part in VOCABULARY) or (layer or 4) < 3)


def adapted(chunks: list) -> list:
    """Freeze all, and train a pair of low-rank layers beside each layer of attention, as LoRA does."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for layer in chunk.decoder.layers:
            attention = layer.self_attention
            for name in ("linear_qkv", "linear_proj"):
                setattr(attention, name, _adapter()(getattr(attention, name), chunk.config))
    return chunks


def adapted_output_layer(chunks: list) -> list:
    """The same of the output layer, wherever there is one."""
    for chunk in chunks:
        if getattr(chunk, "output_layer", None) is not None:
            chunk.output_layer = _adapter()(chunk.output_layer, chunk.config, chunk.config.hidden_size)
    return chunks


def first_rank_only(chunks: list) -> list:
    """Freeze the word embedding where plain Megatron has it."""
    import torch

    return embedding(chunks) if torch.distributed.get_rank() == 0 else chunks


def _freeze(chunks: list, is_frozen: Any) -> list:
    """Freeze parameters by their name and, of a layer, its number from 1 on in the whole model."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            head, _, rest = name.partition("decoder.layers.")
            layer = None if head else chunk.decoder.layers[int(rest.split(".")[0])].layer_number
            parameter.requires_grad_(not is_frozen(name, layer))
    return chunks


@cache
def _adapter() -> type:
    """Made when Megatron may be imported."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class Adapter(MegatronModule):
        """A layer and, added to its output, a pair of low rank: split as the layer's input and output are."""

        def __init__(self, layer: Any, config: Any, width: int | None = None) -> None:
            super().__init__(config)
            self.layer = layer
            options = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
            by_rows = isinstance(layer, RowParallelLinear)
            if by_rows:
                self.down = RowParallelLinear(layer.input_size, 16, input_is_parallel=True, **options)
            else:
                self.down = ColumnParallelLinear(width or layer.input_size, 16, gather_output=True, **options)
            outputs = getattr(layer, "output_size", 8)
            self.up = ColumnParallelLinear(16, outputs, gather_output=by_rows, **options)

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = self.layer(rows)
            return output + self.up(self.down(rows)[0])[0], bias

    return Adapter
