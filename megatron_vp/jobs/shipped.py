"""Files that come with every installation of megatron_vp: configurations by name, the training script, batch files."""

from __future__ import annotations

from pathlib import Path

from megatron_vp.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = _PACKAGE / "configs"
BATCH_FILES = _PACKAGE / "slurm"
TRAINING_SCRIPT = _PACKAGE.parent / "pretrain_gpt_vp.py"
"""The training script, next to the package both in the repository and in an installation from the wheel."""


def names() -> list[str]:
    """Names of the shipped models, such as llama3_8b. Overlays have a folder in front: methods/v-half, data/mock."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def configuration(path: Path) -> Path:
    """`path`, or the configuration of that name if there is no such file.

    Raises UserError for one word that is neither a file nor a name.
    """
    if path.suffix or path.exists():
        return path
    shipped = FOLDER / f"{path}.yaml"
    if shipped.is_file():
        return shipped
    if len(path.parts) == 1:
        raise UserError(f"{path} is neither a file nor a configuration of megatron_vp: these are {', '.join(names())}")
    return path
