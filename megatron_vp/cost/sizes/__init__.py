"""The model and how it is split: sizes of model, job and plan, FLOPs, layouts of layers."""
