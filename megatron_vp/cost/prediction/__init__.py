"""Computes a plan's costs by stage and rank, and simulates it to predict time, MFU, bubble and memory."""
