"""Finds the files of an installation: model configurations, the training script and SLURM batch files."""

from __future__ import annotations

from pathlib import Path

from megatron_vp.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = _PACKAGE / "configs"
BATCH_FILES = _PACKAGE / "slurm"
TRAINING_SCRIPT = _PACKAGE.parent / "pretrain_gpt_vp.py"
"""The training script, next to the package both in the repository and in an installation from the wheel."""


def names() -> list[str]:
    """Names of the shipped model configurations, such as llama3_8b; overlays such as methods/v-half are left out."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def configuration(path: Path) -> Path:
    """Return `path` itself, or the shipped configuration of that name if there is no such file.

    Raises UserError if `path` is a single word and neither a file nor a shipped configuration. A missing file
    `NAME.yaml` is not replaced by the shipped configuration NAME, because the user may have meant a file in another
    folder.
    """
    if path.exists():
        return path
    if len(path.parts) == 1 and (FOLDER / path).is_file():
        raise UserError(f"there is no file {path} here; for the one that comes with megatron_vp, write {path.stem}")
    if path.suffix:
        return path
    shipped = FOLDER / f"{path}.yaml"
    if shipped.is_file():
        return shipped
    if len(path.parts) == 1:
        raise UserError(
            f"{path} is neither a file nor a configuration that comes with megatron_vp; use one of {', '.join(names())}"
        )
    return path
