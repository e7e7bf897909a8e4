"""From a command line to a patched Megatron: launch, preflight, and whether all ranks start the same job."""
