"""Adapts Megatron to the machine: sets the flags that it needs there, and replaces packages that are missing."""
