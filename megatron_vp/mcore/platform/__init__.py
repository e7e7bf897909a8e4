"""Adapts Megatron to the machine: sets the flags that Megatron needs on this machine, and replaces packages that are
missing.
"""
