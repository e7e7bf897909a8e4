"""Run NVIDIA's own training scripts, unmodified, from the checkout of Megatron-LM that MEGATRON_LM names.

    MEGATRON_LM=~/Megatron-LM .venv/bin/python -m pytest -q tests/mcore/test_nvidia_scripts.py

The scripts come from the checkout; `megatron` is the installed package.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_vp.mcore import patches

CHECKOUT = os.environ.get("MEGATRON_LM")


def _series_of(checkout: Path) -> str:
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", text, re.MULTILINE))


def _why_not() -> str | None:
    if CHECKOUT is None:
        return "MEGATRON_LM names no checkout of Megatron-LM, which has NVIDIA's scripts"
    series = _series_of(Path(CHECKOUT))
    if series != patches.present_series():
        return (
            f"the scripts of MEGATRON_LM={CHECKOUT} are of {series}, megatron-core here of {patches.present_series()}"
        )
    return None


needs_checkout = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


class NvidiaScript:
    """A script of NVIDIA's behind two lines, as `tests.harness.training.train` runs scripts; plain without settings."""

    gpt_config_from_args = None
    """Through which hooks reach a model; the script has its own."""

    def __init__(self, name: str, settings: dict[str, object] | None = None) -> None:
        self.path = str(Path(CHECKOUT or "") / name)
        self._settings = settings

    def prepare(self) -> None:
        """The two lines."""
        import megatron_vp

        megatron_vp.enable(**self._settings or {})

    def loss_func(self, loss_mask, token_loss):
        """The script's own; what watches a run puts another function in its place."""
        return self._original(loss_mask, token_loss)

    def main(self) -> None:
        """Run the file as `python FILE` does. Its neighbours are found, and the installed Megatron before theirs."""
        import megatron.training as training

        sys.path.append(str(Path(self.path).parent))
        pretrain = training.pretrain

        def watched(config, datasets, kind, forward_step, **options):
            names = forward_step.__globals__
            self._original = names["loss_func"]
            names["loss_func"] = lambda loss_mask, token_loss, model=None: self.loss_func(loss_mask, token_loss)
            return pretrain(config, datasets, kind, forward_step, **options)

        with mock.patch.object(training, "pretrain", watched):
            runpy.run_path(self.path, run_name="__main__")
