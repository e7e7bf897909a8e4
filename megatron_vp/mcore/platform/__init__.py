"""Adapts Megatron to the machine on which it runs: flags that it needs there, and patches for missing parts."""
