"""Lets `python -m megatron_vp` run the command `megatron-vp`."""

from megatron_vp.cli.app import main

main()
