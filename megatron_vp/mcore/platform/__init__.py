"""Adapts Megatron to the machine: sets the flags that Megatron needs, and replaces missing packages."""
