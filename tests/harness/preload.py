"""Imported once by the fork server: all expensive modules that ranks share, and nothing that starts a thread."""

import gc
import importlib.metadata
import os
from argparse import ArgumentParser
from functools import cache, partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MEGATRON_VP_CPU"] = "1"

from megatron_vp.mcore import patch_table, patches
from megatron_vp.mcore.platform.flags import prepare_environment, quiet_fallback_warnings

prepare_environment(cpu=True)
quiet_fallback_warnings()

for group in patch_table.GROUPS:
    for patch in () if group.package else patch_table.patches_of(group.name):
        patches.resolved(patch.make)
import hypothesis  # noqa: E402, F401
import megatron.core.datasets.helpers  # noqa: E402
import megatron.core.models.mimo  # noqa: E402
import megatron.core.tokenizers.text.models  # noqa: E402, F401
import pytest  # noqa: E402, F401
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.training import argument_utils  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import megatron_vp.mcore.start.banner  # noqa: E402
import pretrain_gpt_vp  # noqa: E402, F401
import tests.harness.parsers  # noqa: E402, F401
from megatron_vp.mcore.start import same_job  # noqa: E402

# What collects the results of a checkpoint's writers: in asynchronous saves Megatron forks it, else it would be a new
# Python that imports all this again.
filesystem_async.get_write_results_queue = partial(filesystem_async.get_write_results_queue, mp_mode="fork")

# What takes long and is the same in all ranks: texts of help from the sources of Megatron's dataclasses,
# the fingerprint of our own sources, and the packages that bring a backend of torch.distributed.
groups = argument_utils.ArgumentGroupFactory
read = cache(partial(groups._get_field_docstrings, object.__new__(groups)))
groups._get_field_docstrings = lambda _, config: read(config)
add_megatron_arguments(ArgumentParser())
same_job.code = cache(same_job.code)
same_job.code(Path(megatron_vp.__file__).parent)
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")

# Ranks neither look through all this for garbage nor copy the pages that a look would write to.
gc.collect()
gc.freeze()
