"""Test that commands without Megatron accept exactly the flags and files that the parser of training accepts."""

import argparse
import enum
import itertools
import json
import sys
from pathlib import Path

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import name_of
from megatron_vp.jobs.config_words import _argument
from megatron_vp.jobs.job_config import read_sizes
from megatron_vp.jobs.known_options import known_options, listed_parser
from megatron_vp.jobs.options import RANGES

DRAWN = [
    *([], [""], ["1"], ["-1"], ["-.5"], ["1.5"], ["1e3"], ["-1e-4"], ["x"], ["-x"], ["true"], ["1_0"], ["0x10"]),
    *(["1", "2"], ["1", "2", "3"], ["x", "-1"], ["[0]*3+[1]"], ["[a]"], ["(1,2)"], ["1,x"], ["SIGCLD"], ["full"]),
    *(["=1"], ["=-1e-4"], ["=-x"], ["="], ["=1", "2"], ["-y", "--"]),
]
"""Words after an option; those that start with `=` belong to the same word as the option."""
OURS_WITH_CHECKS = {"vocab-shards", "pipeline-schedule", "offload-chunks", "pipeline-trace-iterations"}
"""Options of ours whose values are checked where they are used."""


@pytest.fixture(scope="module")
def training():
    """The parser of training."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_vp.mcore.options.arguments import with_ours

    return with_ours(add_megatron_arguments)(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture(scope="module")
def options(training):
    """Each option of training with its action, except those that a later release changes."""
    from megatron_vp.mcore.patches import SUPPORTED_SERIES, present_series

    later = known_options_files()[1:] if present_series() == SUPPORTED_SERIES[0] else []
    changed = {name[2:] for file in later for line in file for name in json.loads(line)[0]}
    return [
        (option, action)
        for option, action in training._option_string_actions.items()
        if option.startswith("--") and option != "--help" and option[2:] not in changed | OURS_WITH_CHECKS
    ]


def known_options_files():
    folder = Path(sys.modules[known_options.__module__].__file__).parent
    files = sorted(folder.glob("known_options*.jsonl"), key=lambda path: path.stem)
    return [file.read_text().splitlines() for file in files]


def choices_of(action):
    for choice in action.choices or ():
        yield from type(choice).__members__ if isinstance(choice, enum.Enum) else [str(choice)]


def spelled(option, words):
    return [option + words[0], *words[1:]] if words and words[0].startswith("=") else [option, *words]


def accepted(function, *arguments):
    try:
        return function(*arguments)
    except UserError:
        return None


def test_flags_are_accepted_or_refused_as_in_training(training, options, monkeypatch):
    for parser in (training, listed_parser()):
        monkeypatch.setattr(parser, "_actions", [])  # Do not set all defaults for each word; this takes 30 seconds.
    differ, choices = [], 0
    for option, action in options:
        drawn = [*DRAWN, *([choice] for choice in set(choices_of(action)))]
        choices += len(drawn) - len(DRAWN)
        for words in (spelled(option, each) for each in drawn):
            parsed = accepted(argparse.ArgumentParser.parse_known_args, training, words)
            if (accepted(lambda: listed_parser().parse_args(words)) is None) != (parsed is None or parsed[1] != []):  # noqa: B023
                differ.append(words)
    assert not differ and choices > 300


def test_every_choice_is_accepted_by_the_reader_of_plan_and_simulate(options):
    for option, action in options:
        for choice in choices_of(action):
            read_sizes([], [option, choice])


def test_values_of_files_are_accepted_or_refused_as_in_training(training, options):
    values = [1, -1, 1.5, "x", "", "-x", True, False, None, [], [1, 2, 3], ["x"], "1e3", "(1,2)", "[0]*3+[1]", [True]]
    differ, known = [], known_options()
    for (option, action), value in itertools.product(options, values):
        for each in [value, *(choices_of(action) if value == 1 else ())]:
            name = name_of(option)
            words = [accepted(_argument, training, of, name, each, "job.yaml") for of in (action, known[name])]
            if words[0] != words[1]:
                differ.append((option, each, words))
    assert not differ


def test_the_list_is_that_of_the_installed_megatron(monkeypatch):
    from scripts import known_options as script

    monkeypatch.setattr(sys, "argv", ["known_options.py", "--check"])
    script.main()
    assert '[["--num-layers"], {"type": "int"}]\n' in script.content()
    monkeypatch.setattr(script, "content", lambda *_: "another")
    with pytest.raises(SystemExit, match=r"known_options.*\.jsonl is out of date: run python "):
        script.main()


def test_what_a_later_release_adds_or_widens_is_known_too():
    known = known_options()
    assert known["mtp_hsm"].nargs == 0 and known["rl_generation_lag"].type is float
    assert {"gdn", "gdn2"} <= set(known["experimental_attention_variant"].choices)
    assert set(RANGES) <= set(known) and "help" not in known
