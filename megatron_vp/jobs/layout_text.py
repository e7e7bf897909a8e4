"""Converts between `--pipeline-model-parallel-layout` and the number of layers of each stage."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_vp.errors import UserError

_LONGEST_LAYOUT = 10_000


def layers_in(layout: str) -> tuple[int, ...]:
    """The number of transformer layers per stage in a `--pipeline-model-parallel-layout` such as `Et*5|(t*5|)*6t*3L`.

    Raises UserError if the text is not a valid layout.
    """
    text = _expanded(layout)
    if not re.fullmatch(r"E?[t|]*[m|]*L?", text):
        raise UserError(f"--pipeline-model-parallel-layout {layout!r} cannot be parsed; write it as Et*4|(t*5|)*6t*3L")
    return tuple(segment.count("t") for segment in text.split("|"))


def stages_behind_mtp(layout: str) -> int:
    """The number of stages behind a layout's MTP layers, which Megatron requires to be in one stage."""
    return _expanded(layout).rpartition("m")[2].count("|") if "m" in layout else 0


def _expanded(layout: str) -> str:
    """The layout with every repetition written out."""
    text = layout.replace(" ", "").replace(",", "")
    while repeated := re.search(r"(?:\(([^()]*)\)|([EtmL]))\*(\d{1,9})", text):
        part, times = repeated[1] or repeated[2] or "", int(repeated[3])
        if len(text) + len(part) * times > _LONGEST_LAYOUT:
            raise UserError(
                f"--pipeline-model-parallel-layout {layout!r} expands to more than {_LONGEST_LAYOUT} letters"
            )
        text = text[: repeated.start()] + part * times + text[repeated.end() :]
    return text


def layout_of(layers: Sequence[int], further_heads: int = 0, behind: int = 0) -> str:
    """The layout string for the given number of transformer layers of each stage, and MTP layers on the stage with
    `behind` stages behind it.
    """
    stages = [f"t*{count}" if count else "" for count in layers]
    stages[-1 - behind] += "m" * further_heads
    return f"E{'|'.join(stages)}L"


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage if `layers` are split as evenly as possible over `stages`."""
    return tuple(layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages))
