"""The only rooms that know Megatron. `patches.py`, which all share, declares what of Megatron is replaced."""
