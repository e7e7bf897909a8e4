"""Recorded runs: the files that the ranks write, the figures computed from them, and the comparison of two runs."""
