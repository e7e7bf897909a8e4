"""Predicts how a job would run under a plan, and compares plans.

A plan is a schedule, a vocabulary method, and the layers and vocabulary rows of every rank. `stage_costs` gives the
seconds of every pass, `predict` simulates the schedule with them, and `evaluation` says how the time is spent.
`candidates` lists plans, `balanced` chooses their layers and rows, `search` compares them, and `choice` judges whether
one is worth it.
"""
