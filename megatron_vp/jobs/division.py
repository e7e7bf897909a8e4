"""How a job divides its ranks, batch and layers, and what every command says if it cannot."""

from __future__ import annotations

from megatron_vp.errors import UserError

TWO_BATCHES = (
    "--step-batch-size-schedule and --global-batch-size exclude each other: leave one out; if a configuration file "
    "sets the batch size, add `global_batch_size: null` in a file given with --config"
)
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


def last_batch(schedule: str) -> int:
    """The batch size at the end of `--step-batch-size-schedule`: pairs THRESHOLD:BATCH, such as `0:256 1B:512`.

    Raises UserError for another text.
    """

    def number(text: str) -> int:
        digits = text.upper().rstrip("KMBT")
        return int(float(digits) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[text.upper()[len(digits) :]])

    try:
        pairs = [pair.split(":") for pair in str(schedule).replace(",", " ").split()]
        if (last := max((number(threshold), number(batch)) for threshold, batch in pairs)[1]) < 1:
            raise ValueError("no samples")
        return last
    except (KeyError, OverflowError, ValueError) as error:
        raise UserError(
            f"--step-batch-size-schedule {schedule!r} cannot be parsed: give THRESHOLD:BATCH pairs, as in "
            "'0:256 1B:512'"
        ) from error
