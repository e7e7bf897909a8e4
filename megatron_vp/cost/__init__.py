"""The cost model, which counts FLOPs and bytes and predicts time and memory. This package does not import torch."""
