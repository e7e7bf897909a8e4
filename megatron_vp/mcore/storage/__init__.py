"""Checks the files of a run (data and checkpoints) before it starts, and makes saving and loading safer."""
