"""What a job computes: its sizes, read from Megatron's arguments, and its layers as lists of operations.

`job_sizes` reads a `Job` and its `ModelShape` (in `shapes`), `job_plan` reads its plan. `layer_operations` lists what a
layer of each kind does. Weights, FLOPs, activations and seconds are sums over these lists.
"""
