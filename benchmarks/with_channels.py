"""Run a training script whose messages between ranks use another number of NCCL channels, with one thread block each.

    torchrun ... benchmarks/with_channels.py CHANNELS SCRIPT [ARGUMENT...]

A message occupies its thread blocks while it waits for the peer. Fewer blocks therefore cost passes less, but move the
message more slowly.
"""

from __future__ import annotations

import runpy
import sys

from megatron_vp.runtime import groups

if __name__ == "__main__":
    groups.EDGE_CTAS = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
