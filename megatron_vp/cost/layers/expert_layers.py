"""Reads from `--moe-layer-freq` which layers of a GPT model have experts."""

from __future__ import annotations

import ast
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import LARGEST


def expert_layers(frequency: Any, layers: int) -> tuple[bool, ...]:
    """Whether each of the model's `layers` has experts.

    `frequency` is a number N (every N-th layer has experts, starting with the first) or a list (1 for each layer with
    experts, 0 for each layer without). A string with an expression of numbers, lists, + and * is also accepted, such as
    "([0]*3+[1]*58)". Raises UserError for anything else.
    """
    found = frequency
    if isinstance(frequency, str):
        try:
            found = _value(ast.parse(frequency.strip(), mode="eval").body)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            found = None
    if isinstance(found, int) and not isinstance(found, bool) and found > 0:
        return tuple(index % found == 0 for index in range(layers))
    if not isinstance(found, list) or any(each not in (0, 1) for each in found):
        raise UserError(
            f'moe_layer_freq {frequency!r} cannot be read: give a number, or a list of 0 and 1 such as "([0]*3+[1]*58)"'
        )
    if len(found) != layers:
        raise UserError(
            f"moe_layer_freq lists {len(found)} layers, but the model has {layers}: give one number per layer"
        )
    return tuple(map(bool, found))


def _value(node: ast.expr) -> Any:
    """Evaluate an expression of numbers, lists, + and *. Raises ValueError or TypeError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=parts):
            return [_value(part) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if max(_length(first), _length(second)) > LARGEST["num_layers"]:
                raise ValueError("too long")
            return first * second
    raise ValueError("an expression may contain only numbers, lists, + and *")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value)
