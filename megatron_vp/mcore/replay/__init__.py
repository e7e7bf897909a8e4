"""Runs one rank of a large job without the other ranks."""
