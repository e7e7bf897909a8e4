"""Triton kernels of passes S, T and IB, for the devices that have Triton."""
