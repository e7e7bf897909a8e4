"""Recorded runs: the files that the ranks write, what they show, and how that compares with the simulator."""
