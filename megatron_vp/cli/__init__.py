"""The `megatron-vp` command: one file per subcommand. Each subcommand imports its dependencies only when it runs."""
