"""Reads a job's configuration and flags in the same way for every command, without torch or Megatron."""
