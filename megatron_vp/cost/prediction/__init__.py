"""A plan's costs by stage and rank, and its simulation: time, MFU, bubble and memory."""
