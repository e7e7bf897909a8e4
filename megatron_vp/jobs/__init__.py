"""A job's configuration and flags as data, read the same way by every command. Imports neither torch nor Megatron."""
