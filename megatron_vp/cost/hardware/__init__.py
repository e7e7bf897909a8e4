"""GPUs and networks as data, and the few numbers fitted to measured runs."""
