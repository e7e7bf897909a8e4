"""Runs a lowered program: executor, point-to-point links and vocabulary collectives; imports nothing of Megatron."""
