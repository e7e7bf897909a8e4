"""Reads documents from files, and trains byte-level BPE tokenizers on them. Needs neither torch nor Megatron."""
