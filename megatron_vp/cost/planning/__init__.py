"""The candidates of a job, or of a number of GPUs, predicted and ranked."""
