"""Checks data and checkpoints before a run starts, and makes saving and loading safer."""
