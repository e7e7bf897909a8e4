"""Test that the mutants of `benchmarks/mutants.py` fit the code that they are for."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import mutants


def test_every_mutant_can_be_applied():
    assert len(mutants.mutants()) >= 300
    found = mutants.problems()
    assert not found, "\n".join(["where a mutant's code went, write the same fault for the new code:", *found])
