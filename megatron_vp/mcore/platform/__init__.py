"""Where Megatron runs: what it must be told on this machine, and patches for what is missing there."""
