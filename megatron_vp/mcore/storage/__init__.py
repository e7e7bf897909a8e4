"""The inputs and outputs of a run, data and checkpoints, checked before it starts."""
