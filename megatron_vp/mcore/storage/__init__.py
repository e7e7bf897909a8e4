"""Checks a run's inputs and outputs (data and checkpoints) before it starts."""
