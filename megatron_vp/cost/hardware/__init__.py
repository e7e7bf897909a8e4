"""GPUs and networks as data, and the few constants fitted to measured runs."""
