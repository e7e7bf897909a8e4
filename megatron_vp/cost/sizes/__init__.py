"""Sizes of models, jobs and plans, FLOPs, and layouts of layers."""
