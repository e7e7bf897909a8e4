"""The list of options that commands read jobs with is that of the parser that training uses."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Option, known_options, refuse_unknown, refuse_wrong_value

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_is_that_of_the_installed_megatron():
    command = [sys.executable, str(ROOT / "scripts" / "known_options.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_list_that_is_out_of_date_is_named(tmp_path):
    from scripts import known_options as script

    assert script.content() == script.FILE.read_text()
    assert "num-layers int\n" in script.content() and "vocab-parallel switch\n" in script.content()


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
    with pytest.raises(UserError, match="--trase is no known option; the nearest known one is --trace"):
        refuse_unknown("trase", "--trase", ["trace"])
