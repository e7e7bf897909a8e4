"""How long an iteration takes and how much memory it needs, without running it. Pure Python.

`layers` describes a job and lists the operations of its layers. `hardware` describes GPUs. `ranks` sums the operations
to the seconds and bytes of one rank. `planning` simulates whole schedules with these numbers, and searches for the best
plan. `paper` compares with the paper's tables.
"""
