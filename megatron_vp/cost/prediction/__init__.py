"""Computes a plan's costs by stage and rank, and simulates it: time, MFU, bubble and memory."""
