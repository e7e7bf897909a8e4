"""Records which lines of the mutated files each test runs, in every process that the test starts.

Python imports this module at the start of each process that has this folder on its PYTHONPATH. It is active only if
LINES_IN names a folder, which holds `files` (absolute paths, one per line) and `current` (the number of the test that
is running). A line `TEST FILE LINE` is added to `lines` there whenever a process runs a line for the first time in a
test. Files and tests are numbered from 0.
"""

import os
import sys
from contextlib import suppress

FOLDER = os.environ.get("LINES_IN")


def record(folder: str) -> None:
    """Record the lines that this process and its forks run from now on."""
    with open(os.path.join(folder, "files"), encoding="utf-8") as listed:
        numbers = {path: number for number, path in enumerate(listed.read().splitlines())}
    log = os.open(os.path.join(folder, "lines"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    current = os.open(os.path.join(folder, "current"), os.O_RDONLY)

    def ran(code, line):
        number = numbers.get(code.co_filename)
        if number is not None:
            with suppress(OSError):  # A test limits the size of files.
                os.write(log, b"%d %d %d\n" % (int(os.pread(current, 20, 0)), number, line))
        return sys.monitoring.DISABLE

    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "mutants")
    sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, ran)
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)


if FOLDER and os.path.isdir(FOLDER):
    record(FOLDER)
