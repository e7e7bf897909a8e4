"""Describes the sizes of models and jobs, counts their FLOPs, and distributes layers over stages."""
