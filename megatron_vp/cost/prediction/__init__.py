"""Computes a plan's costs by stage and rank, and simulates the plan to predict time, MFU, bubble and memory."""
