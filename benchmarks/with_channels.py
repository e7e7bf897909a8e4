"""Run a training script whose messages between ranks use another number of NCCL channels, with one thread block each.

    torchrun ... benchmarks/with_channels.py CHANNELS[,CLUSTER] SCRIPT [ARGUMENT...]

A message occupies its thread blocks while it waits for the peer. Fewer blocks therefore cost passes less, but move the
message more slowly. On compute capability 9.0, NCCL launches up to four blocks as one cluster, which needs free
multiprocessors in one GPC. CLUSTER sets the number of blocks in a cluster.
"""

from __future__ import annotations

import runpy
import sys

from megatron_vp.runtime import groups

if __name__ == "__main__":
    channels, _, cluster = sys.argv[1].partition(",")
    groups.EDGE_CTAS = int(channels)
    if cluster:
        make = groups._nccl_options

        def clustered(timeout, ctas):
            """The options of a communicator, None for other backends."""
            options = make(timeout, ctas)
            if options is not None:
                options.config.cga_cluster_size = int(cluster)
            return options

        groups._nccl_options = clustered
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
