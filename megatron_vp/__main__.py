"""Runs the command `megatron-vp` as `python -m megatron_vp`."""

from megatron_vp.cli.app import main

main()
