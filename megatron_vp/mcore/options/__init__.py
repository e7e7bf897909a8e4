"""Reads and checks the user's options: arguments, configuration files, refusals, and options without effect."""
