"""Reads documents from files, and trains byte-level BPE tokenizers on them, without torch or Megatron."""
