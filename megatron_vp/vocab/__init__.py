"""The vocabulary layers: output layer (passes S and T) and input embedding (IF and IB), one shard per rank.

Local mathematics only, on torch tensors: no Megatron, no communication. What travels between ranks, and when, is the
business of `megatron_vp.runtime`.
"""
