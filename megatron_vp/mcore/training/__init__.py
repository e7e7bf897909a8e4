"""Replaces Megatron's pipeline schedule: captures the user's `forward_step`, then runs the model's passes."""
