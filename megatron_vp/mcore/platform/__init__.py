"""The machine that Megatron runs on: flags that it needs there, and patches for missing parts."""
