"""What every command says if a job's ranks, batch or layers cannot be divided equally."""

UNEVEN_RANKS = (
    "{world_size} ranks cannot be divided into replicas of {replica_ranks} ranks ({pipeline_model_parallel_size} "
    "pipeline x {tensor_model_parallel_size} tensor x {context_parallel_size} context): use a multiple of "
    "{replica_ranks}"
)
UNEVEN_BATCH = (
    "--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} times the "
    "data-parallel size {replicas}: use a multiple of {samples}"
)
UNEVEN_LAYERS = (
    "{num_layers} layers cannot be split equally over {stages} stages: use a number of stages that divides the number "
    "of layers, or assign the layers to stages with --pipeline-model-parallel-layout"
)
