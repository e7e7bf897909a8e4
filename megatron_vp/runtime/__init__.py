"""Runs a lowered program: executor, point-to-point links, vocabulary collectives on the second stream. No Megatron."""
