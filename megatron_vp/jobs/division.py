"""How a job's batch grows, and what every command says if it cannot."""

from __future__ import annotations

from megatron_vp.errors import UserError

TWO_BATCHES = (
    "--step-batch-size-schedule and --global-batch-size exclude each other: leave one out; if a configuration file "
    "sets the batch size, add `global_batch_size: null` in a file given with --config"
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
