"""`python -m megatron_vp`: the command megatron-vp."""

from megatron_vp.cli.app import main

main()
