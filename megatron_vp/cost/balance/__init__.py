"""Chooses the layers and vocabulary rows of each rank, so that no rank waits for another."""
