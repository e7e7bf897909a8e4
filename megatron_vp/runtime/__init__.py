"""Executor, point-to-point links and vocabulary collectives that run a lowered program without importing Megatron."""
