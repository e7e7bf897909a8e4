"""The vocabulary layers: the output layer (passes S and T) and the input embedding (IF and IB), one shard per rank.

This package computes only on local torch tensors; it uses neither Megatron nor communication. `megatron_vp.runtime`
decides which data is sent between ranks, and when.
"""
