"""Predicts and ranks the candidates of a job, or of a number of GPUs."""
