"""Imported once by the fork server: everything expensive that the ranks share, and nothing that starts a thread."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MEGATRON_VP_CPU"] = "1"

from megatron_vp.mcore import patches, platform

platform.prepare_environment(cpu=True)
platform.quiet_fallback_warnings()

for name in patches.GROUPS:
    patches.group(name)
import pretrain_gpt_vp  # noqa: E402, F401
