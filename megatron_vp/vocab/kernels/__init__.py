"""Triton kernels for the passes S, T and IB and the collective C1, on devices that Triton supports."""
