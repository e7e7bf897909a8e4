"""Replaces Megatron's pipeline schedule: records how `forward_step` calls the model, then runs the model's passes."""
