"""A job's configuration and flags as data, read the same way by every command, without torch or Megatron."""
