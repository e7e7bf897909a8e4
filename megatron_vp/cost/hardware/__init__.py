"""Descriptions of GPUs and networks, and the few constants that are fitted to measured runs."""
