"""Imported once by the fork server: all expensive modules that ranks share, and nothing that starts a thread."""

import gc
import os
from argparse import ArgumentParser
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MEGATRON_VP_CPU"] = "1"

from megatron_vp.mcore import patch_table, patches
from megatron_vp.mcore.platform.flags import prepare_environment, quiet_fallback_warnings

prepare_environment(cpu=True)
quiet_fallback_warnings()

for group in patch_table.GROUPS:
    for patch in () if group.package else patch_table.patches_of(group.name):
        patches.resolved(patch.make)
import megatron.core.tokenizers.text  # noqa: E402, F401
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import pretrain_gpt_vp  # noqa: E402, F401
import tests.harness.parsers  # noqa: E402, F401

# What collects the results of a checkpoint's writers: in asynchronous saves Megatron forks it, else it would be a new
# Python that imports all this again.
filesystem_async.get_write_results_queue = partial(filesystem_async.get_write_results_queue, mp_mode="fork")

add_megatron_arguments(ArgumentParser())

# Ranks neither look through all this for garbage nor copy the pages that a look would write to.
gc.collect()
gc.freeze()
