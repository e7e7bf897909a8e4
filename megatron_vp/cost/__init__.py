"""The cost model: FLOPs, bytes, hardware, predictions of time and memory, the paper's tables. Does not import torch."""
