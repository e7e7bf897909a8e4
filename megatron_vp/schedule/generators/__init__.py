"""The families' building blocks, one per file. `megatron_vp.schedule.families` lists them."""
