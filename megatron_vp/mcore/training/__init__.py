"""Replaces Megatron's pipeline schedule: captures the user's step and drives its chunks."""
