"""Reads arguments and configuration files, refuses unsupported options, and warns about options without effect."""
