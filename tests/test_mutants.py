"""Test that the mutants of `benchmarks/mutants.py` fit the code that they are for."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import mutants


def test_every_mutant_can_be_applied():
    assert len(mutants.mutants()) == 300
    found = mutants.problems()
    assert not found, "\n".join(["where a mutant's code went, write the same fault for the new code:", *found])


def test_a_mutant_whose_text_is_gone_or_stays_the_same_is_named(monkeypatch):
    file, text = "megatron_vp/runtime/store.py", "self.now -= 1"
    gone, same, broken = (
        mutants.Mutant("store", "a fault", file, old, new)
        for old, new in [("no such text", "pass"), (text, f"{text}  # the same"), (text, "self.now -=")]
    )
    assert gone.problem() == f"its text occurs 0 times in {file}"
    assert same.problem() == "its replacement changes nothing"
    assert broken.problem().startswith("its replacement is not valid Python")
    monkeypatch.setattr(mutants, "mutants", lambda: [gone, gone])
    assert mutants.problems()[0] == "store: a fault is there twice"


def test_tests_are_chosen_by_their_lines_and_price():
    mutant = next(each for each in mutants.mutants() if each.name == "leaving raises the count")
    (line,) = mutant.lines()
    cases = [("long", 15, line), ("of[1]", 1, line), ("of[2]", 2, line), ("mid", 8, line), ("other", 1, line + 1)]
    tests = {name: {"seconds": seconds, "lines": {mutant.file: [at]}} for name, seconds, at in cases}
    assert list(mutants.chosen_tests(mutant, tests, 20)) == ["of[1]", "mid", "of[2]"]
