"""A training script whose messages between ranks may take other numbers of NCCL's channels, one thread block each.

    torchrun ... benchmarks/with_channels.py CHANNELS SCRIPT [ARGUMENT...]

A message holds its thread blocks while it waits for the peer, so fewer cost the passes less, and move it more slowly.
"""

from __future__ import annotations

import runpy
import sys

from megatron_vp.runtime import groups

if __name__ == "__main__":
    groups.EDGE_CTAS = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
