"""Triton kernels for the passes S, T and IB and the collectives TOKENS and C1, on devices that Triton supports."""
