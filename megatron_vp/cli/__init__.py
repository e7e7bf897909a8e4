"""The `megatron-vp` command: one file a subcommand, each importing what it needs only when it runs."""
