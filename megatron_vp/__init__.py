"""Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core."""

__version__ = "0.1.0"
