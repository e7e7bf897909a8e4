"""Makes the reports of a run: pass times, memory and traces."""
