"""The cost model, which counts FLOPs and bytes and predicts time and memory. It does not import torch."""
