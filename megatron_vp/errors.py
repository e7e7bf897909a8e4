"""The one exception that means: the user can fix this.

Every command turns it into a single line on standard error and exit status 2; a training job prints the line on
every rank and exits non-zero. Everything else is a defect of this project and keeps its traceback.
"""


class UserError(ValueError):
    """Raised for input that cannot work. The message says what was given, why it cannot work, and what to do."""
