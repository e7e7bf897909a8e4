"""Predicts and ranks candidate plans for a job, or for a number of GPUs."""
