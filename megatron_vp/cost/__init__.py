"""How long and how much memory: FLOPs, bytes, hardware, predictions and the paper's tables. Imports no torch."""
