"""The vocabulary layers: the output layer (passes S and T) and the input embedding (IF and IB), one shard per rank.

This package only computes on local torch tensors, without Megatron and without communication. `megatron_vp.runtime`
decides which data is sent between ranks, and when.
"""
