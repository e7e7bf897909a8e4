"""Test that the list of known options, which commands use without Megatron, matches the parser of training."""

import sys

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Option, known_options, refuse_unknown, refuse_wrong_value


def test_the_list_is_that_of_the_installed_megatron(monkeypatch):
    from scripts import known_options as script

    monkeypatch.setattr(sys, "argv", ["known_options.py", "--check"])
    script.main()
    assert "num-layers int\n" in script.content() and "vocab-parallel switch\n" in script.content()
    monkeypatch.setattr(script, "HEADER", "another")
    with pytest.raises(SystemExit, match=r"known_options.*\.txt is out of date: run python scripts/known_options\.py"):
        script.main()


def test_what_a_later_release_adds_or_widens_is_known_too():
    known = known_options()
    assert known["mtp_hsm"] == Option("switch", False, ())
    assert known["rl_generation_lag"].kind == "float" and "gdn2" in known["experimental_attention_variant"].choices


def test_an_option_says_what_it_takes():
    known = known_options()
    assert known["bf16"] == Option("switch", False, ())
    assert known["lr"] == Option("float", False, ())
    assert known["data_path"] == Option("text", True, ())
    assert known["recompute_granularity"] == Option("text", False, ("full", "selective"))
    assert "help" not in known and {"vocab_parallel", "pipeline_schedule"} <= set(known)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 1), ("lr", -1e-4), ("lr", None), ("bf16", False), ("data_path", ["0.5", "x"]), ("data_path", 3)],
)
def test_what_training_takes_is_taken(name, value):
    refuse_unknown(name, f"--{name}")
    refuse_wrong_value(name, value, f"--{name}")


def test_the_options_of_the_command_are_near_too():
    with pytest.raises(UserError, match="--trase is not a known option; the nearest known option is --trace"):
        refuse_unknown("trase", "--trase", ["trace"])
