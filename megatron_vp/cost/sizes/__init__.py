"""The model and how it is split: model, job and plan as numbers, FLOPs, layouts of layers."""
