"""Starts a job: launch, preflight checks, and the check that all ranks run the same job."""
