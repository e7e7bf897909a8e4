"""Reports of a run: passes, memory, traces."""
