"""Runs a lowered program: executor, point-to-point links and vocabulary collectives; does not import Megatron."""
