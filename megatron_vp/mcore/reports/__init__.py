"""Reports what a run measures: pass times, memory and traces."""
