"""Reads and writes `--hybrid-layer-pattern`: a letter for each layer, `|` between stages, `/` before MTP heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megatron_vp.errors import UserError

LETTERS = "*-EMGD+"
"""Megatron's layer letters: attention, MLP, experts, Mamba, gated delta net, and two kinds of latent attention."""

_NAMES = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""The argument's name, and its old name, which Megatron still accepts."""


@dataclass(frozen=True)
class Pattern:
    """The layers of a hybrid model.

    letters: one for each layer of the main decoder.
    layers: the number of layers of each virtual stage; None if the pattern has no bars.
    heads: the letters of each multi-token prediction head.
    """

    letters: str
    layers: tuple[int, ...] | None = None
    heads: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a pattern. Raises UserError if Megatron would not accept the pattern."""
        main, *heads = text.split("/")
        segments = main.split("|")
        letters = "".join(segments)
        for part in (letters, *heads):
            unknown = next((letter for letter in part if letter not in LETTERS), None)
            if unknown is not None:
                raise UserError(
                    f"--hybrid-layer-pattern {text!r}: {unknown!r} is not a layer's letter; use {' '.join(LETTERS)}, "
                    "| between pipeline segments, / before each additional prediction head"
                )
            if "*" in part and ("D" in part or "+" in part):
                raise UserError(
                    f"--hybrid-layer-pattern {text!r}: Megatron cannot combine attention * with D or +; use one of them"
                )
        if not letters:
            raise UserError(f"--hybrid-layer-pattern {text!r} has no layers; write one letter per layer, such as *-*-")
        if not any(heads):
            heads = []
        if len(set(heads)) > 1:
            raise UserError(f"--hybrid-layer-pattern {text!r}: the parts after slashes differ; make them the same")
        layers = tuple(map(len, segments)) if len(segments) > 1 else None
        return cls(letters, layers, tuple(heads))

    def segments(self, layers: Sequence[int]) -> tuple[str, ...]:
        """The letters of each stage, given the number of layers of each stage."""
        return tuple(self.letters[start:end] for start, end in pairwise(accumulate(layers, initial=0)))

    def with_bars(self, layers: Sequence[int]) -> str:
        """The pattern as text with bars between stages, given the number of layers of each stage."""
        return "/".join(["|".join(self.segments(layers)), *self.heads])


def pattern_in(arguments: Mapping[str, Any]) -> Pattern | None:
    """The hybrid pattern among a job's arguments, whose keys are long names with underscores; None for a GPT model.

    Raises UserError if Megatron would not accept the pattern, or if `arguments` contains different patterns under the
    option's new and old names.
    """
    given = [value for value in map(arguments.get, _NAMES) if value is not None]
    if len(set(map(str, given))) > 1:
        raise UserError(
            "--hybrid-override-pattern is the old name of --hybrid-layer-pattern and has another value: leave it out"
        )
    return Pattern.parse(str(given[0])) if given else None
