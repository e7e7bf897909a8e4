"""The two exceptions that are told in one line. Everything else is a defect of this project and keeps its traceback."""


class UserError(ValueError):
    """Raised for input that cannot work. The message says what was given, why it cannot work, and what to do.

    Every command turns it into a single line on standard error and exit status 2; a training job prints the line on
    every rank and exits non-zero.
    """


class Fault(RuntimeError):
    """Raised where a rank cannot go on because of a peer or a link. The message says where in the schedule it waited.

    A training job prints the line and exits with status 1, on every rank that is left.
    """
