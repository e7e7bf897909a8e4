"""A pytest plugin that reports each phase of each test to `benchmarks/mutants.py` as soon as it ends.

OUTCOMES_IN names a folder. `outcomes` there gets a line of JSON for each phase of a test. While lines are recorded,
`current` has the number of the running test. If `limits` exists there, it gives the seconds after which a test fails.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ["OUTCOMES_IN"])
TESTS: list[str] = []


def pytest_runtest_logstart(nodeid):
    """Name the test that runs from now on."""
    TESTS.append(nodeid)
    if "LINES_IN" in os.environ:
        # Overwritten in place, because other processes keep the file open.
        with open(FOLDER / "current", "r+") as current:
            current.write(f"{len(TESTS) - 1:<20}")
        with open(FOLDER / "order", "a") as order:
            order.write(f"{nodeid}\n")
        sys.monitoring.restart_events()


def pytest_runtest_logreport(report):
    """Add a line for a phase that has ended."""
    line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome, "seconds": report.duration}
    with open(FOLDER / "outcomes", "a") as outcomes:
        outcomes.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that takes much longer than it took without a fault."""
    limits = FOLDER / "limits"
    if not limits.exists():
        return (yield)

    def give_up(*_):
        raise TimeoutError("the test takes much longer than without the fault")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, json.loads(limits.read_text())[item.nodeid])
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
