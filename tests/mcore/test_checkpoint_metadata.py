"""Test that a checkpoint's `.metadata`, a pickle of unknown origin, is read without running anything that it names."""

from __future__ import annotations

import argparse
import pickle

import pytest
import torch
from torch.distributed import checkpoint

from megatron_vp.errors import UserError
from megatron_vp.mcore.storage.checkpoint_check import check_checkpoint, read_metadata
from megatron_vp.mcore.storage.checkpoint_files import TRACKER

FILESYSTEM = "torch.distributed.checkpoint.filesystem"


@pytest.fixture
def folder(tmp_path):
    """A directory to load from, with a checkpoint of torch's own making at iteration 2."""
    step = tmp_path / "iter_0000002"
    state = {"weight": torch.ones(4, 3, dtype=torch.bfloat16), "steps": torch.ones(2, dtype=torch.int64), "text": "x"}
    checkpoint.save(state, checkpoint_id=step, no_dist=True)
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / TRACKER).write_text("2")
    return tmp_path


class Arguments(argparse.Namespace):
    """Those of a run that only loads: every option but `load` is left out."""

    def __getattr__(self, name):
        return None


def arguments(folder):
    return Arguments(load=str(folder))


def planted(module: str, name: str, *words: object) -> bytes:
    """A pickle that calls `module.name` with `words` when it is loaded."""
    text = pickle.dumps(words, protocol=4)[2:-1]  # without its header and its end
    text = text[9:] if text[:1] == b"\x95" else text  # nor the length of its frame
    return (
        b"\x80\x04" + b"".join(b"\x8c" + bytes([len(w)]) + w.encode() for w in (module, name)) + b"\x93" + text + b"R."
    )


def test_all_that_torch_writes_is_read(folder):
    read = read_metadata(folder / "iter_0000002")
    expected = checkpoint.FileSystemReader(folder / "iter_0000002").read_metadata()
    assert read.state_dict_metadata == expected.state_dict_metadata and read.storage_data == expected.storage_data


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        (FILESYSTEM, "os.system"),
        (FILESYSTEM, "Path.touch"),
        ("torch.distributed.checkpoint", "filesystem.os.system"),
    ],
)
def test_nothing_that_it_names_is_run(folder, module, name):
    mark = folder / "mark"
    command = f"touch {mark}"
    words = (mark,) if name == "Path.touch" else (command,)
    (folder / "iter_0000002" / ".metadata").write_bytes(planted(module, name, *words))
    with pytest.raises(UserError) as refused:
        check_checkpoint(arguments(folder))
    assert "the pickle refers to " in str(refused.value) and "was not executed" in str(refused.value)
    assert "\n" not in str(refused.value) and not mark.exists()
    # The same file, read as torch reads it, runs.
    with pytest.raises(Exception):  # noqa: B017
        checkpoint.FileSystemReader(folder / "iter_0000002").read_metadata().storage_data.values()
    assert mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("torch", "load"), (FILESYSTEM, "FileSystemReader"), (FILESYSTEM, "Path")],
)
def test_functions_and_classes_that_are_no_records_are_refused(folder, module, name):
    (folder / "iter_0000002" / ".metadata").write_bytes(planted(module, name, "1"))
    with pytest.raises(pickle.UnpicklingError, match=f"refers to {module}.{name}, which does not belong"):
        read_metadata(folder / "iter_0000002")


@pytest.mark.parametrize("said", ["9" * 5000, "x" * 10**6, "-1", "\x1b[31m\n2"])
def test_a_tracker_that_names_no_iteration_is_one_short_line(folder, said):
    (folder / TRACKER).write_text(said)
    with pytest.raises(
        UserError, match=r"is corrupt: it contains .* instead of an iteration number; use --ckpt-step 2"
    ) as refused:
        check_checkpoint(arguments(folder))
    assert str(refused.value).isprintable() and len(str(refused.value)) < 500
