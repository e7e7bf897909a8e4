"""From a command line to a patched Megatron: launch, preflight, and the check that all ranks start the same job."""
