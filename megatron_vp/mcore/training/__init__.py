"""Replaces Megatron's pipeline schedule: captures the arguments of `forward_step`, then runs the model's passes."""
