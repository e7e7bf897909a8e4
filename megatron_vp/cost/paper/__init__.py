"""The tables of the paper that introduced vocabulary parallelism, as a test of the cost model.

A cell of a table is one training run: a model, a method and a vocabulary size. The cost model predicts each cell's MFU
and memory, `tables` compares them with published values, and `cells` lists jobs that repeat the runs.
"""
