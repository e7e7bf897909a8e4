"""Test that a table names all Megatron arguments that we read, and that a missing one gives a one-line error."""

import argparse
import re
from collections import defaultdict

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore import megatron_arguments, patches
from megatron_vp.mcore.megatron_arguments import DERIVED, IN_TRAINING, LACKS, READ
from megatron_vp.mcore.options import ranges
from megatron_vp.mcore.options.arguments import with_ours
from megatron_vp.mcore.options.refusals import REFUSALS
from megatron_vp.mcore.options.refused_sizes import SIZE_REFUSALS
from megatron_vp.mcore.options.script_options import SCRIPT_OPTIONS
from megatron_vp.mcore.storage import optimizer_check
from tests.mcore.megatron_uses import arguments_of, sources

TABLES = {
    "options": {
        *(*ranges.AT_LEAST_ONE, *ranges.AT_LEAST_ZERO, *ranges.FROM_ZERO_BELOW_ONE),
        *SCRIPT_OPTIONS,
        *(name for refusal in (*SIZE_REFUSALS, *REFUSALS) for name in re.findall(r"{(\w+)}", refusal.message)),
    },
    "storage": set(optimizer_check._LAYOUT),
}
"""Names of arguments that stand in tables of our sources."""

NO_ARGUMENTS = {
    *("our_schedule", "own_chunks", "replica_ranks", "replicas", "samples", "stages", "transformer_engine_version"),
    *("file_holders", "file_method", "file_microbatches", "file_ranks", "microbatches", "row_holders"),
}
"""Names in the messages of refusals that no argument has."""


def our_arguments():
    """Our options, and what our own validation adds."""
    options = {action.dest for action in with_ours(lambda parser: parser)(argparse.ArgumentParser())._actions}
    return options | {"chunk_placement", "schedule_fingerprint", "vocab_rows"}


def parser(without=()):
    """Megatron's parser with our options, as a release would have it that lacks some options."""
    from megatron.training import arguments

    def reduced(given):
        arguments.add_megatron_arguments(given)
        for action in [action for action in given._actions if action.dest in without]:
            given._remove_action(action)
            for name in action.option_strings:
                del given._option_string_actions[name]
        return given

    return with_ours(reduced)(argparse.ArgumentParser(allow_abbrev=False))


def test_every_argument_that_a_source_reads_is_in_the_table_and_no_other():
    found = defaultdict(set)
    for room, path in sources():
        found[room] |= arguments_of(path.read_text())
    for room, names in TABLES.items():
        found[room] |= names - NO_ARGUMENTS
    ours = our_arguments()
    for room in {*found, *READ}:
        listed = set(READ[room].names) if room in READ else set()
        missing, stale = found[room] - ours - listed, listed - found[room]
        assert not missing, f"add to READ[{room!r}] in mcore/megatron_arguments.py: {sorted(missing)}"
        assert not stale, f"{room} does not read: {sorted(stale)}"


def test_the_scan_sees_every_way_of_reading_an_argument():
    source = """
args.one
a.two
get_args().three
self.args.four
getattr(args, "five", None)
for name in ("six", "seven"):
    print(getattr(args, name))
args.written = 1
args._ours
other.attribute
"""
    assert arguments_of(source) == {"one", "two", "three", "four", "five", "six", "seven"}


def test_the_installed_megatron_has_every_argument(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["script.py"])
    args = parser().parse_args([])
    absent = {name for reads in READ.values() for name in reads.names if not hasattr(args, name)}
    assert absent == {*DERIVED, *IN_TRAINING, *LACKS.get(patches.present_series(), ())}


@pytest.mark.parametrize(("name", "use"), [("seq_length", "options"), ("async_save", "storage"), ("fp4", "options")])
def test_a_renamed_argument_is_one_line_when_the_arguments_are_parsed(monkeypatch, capsys, name, use):
    monkeypatch.setattr("sys.argv", ["script.py"])
    with pytest.raises(UserError) as error:
        parser(without={name}).parse_args([])
    line = str(error.value)
    assert f"megatron-core {patches.installed_version()} has no argument '{name}'" in line and "\n" not in line
    assert READ[use].use in line and "0.19.0, 0.19.2, 0.20" in line and "install megatron-core==0.19.2" in line


def test_the_command_names_an_argument_that_the_installed_megatron_lacks(monkeypatch):
    from megatron.training import arguments

    assert megatron_arguments.missing() == []
    lacking = parser(without={"async_save"})
    monkeypatch.setattr(arguments, "add_megatron_arguments", lambda given: lacking)
    (problem,) = megatron_arguments.missing()
    assert str(problem).startswith(
        "the argument 'async_save' does not fit megatron_vp: expected an option, to check data and checkpoints"
    )


def test_a_release_series_may_lack_an_argument(monkeypatch):
    from megatron.training import arguments

    monkeypatch.setattr("sys.argv", ["script.py"])
    without = parser(without={"async_save"})
    monkeypatch.setattr(arguments, "add_megatron_arguments", lambda given: without)
    assert len(megatron_arguments.missing()) == 1
    lacks = LACKS.get(patches.present_series(), ())
    monkeypatch.setattr(megatron_arguments, "LACKS", {patches.present_series(): (*lacks, "async_save")})
    assert megatron_arguments.missing() == []
    assert not hasattr(without.parse_args([]), "async_save")
    # Another series has it.
    monkeypatch.setattr(megatron_arguments, "present_series", lambda: "9.1")
    assert {str(each).split("'")[1] for each in megatron_arguments.missing()} == {"async_save", *lacks}


@pytest.mark.parametrize(
    ("option", "name", "default", "value"),
    [("--output-logit-dtype", "logit_dtype", None, "fp32"), ("--mtp-hsm", "mtp_hsm", False, True)],
)
def test_an_option_of_one_series_is_refused_there(option, name, default, value):
    given = argparse.Namespace(vocab_parallel=True, pipeline_schedule="1f1b", offload_chunks="0")
    (refusal,) = [each for each in REFUSALS if option in each.message]
    assert not refusal.applies(given)
    setattr(given, name, default)
    assert not refusal.applies(given)
    setattr(given, name, value)
    assert refusal.applies(given)


def test_what_megatron_derives_is_checked_when_it_has_validated(monkeypatch):
    everything = argparse.Namespace(**{name: None for reads in READ.values() for name in reads.names})
    megatron_arguments.check_parsed(everything)
    megatron_arguments.check_validated(everything)
    del everything.data_parallel_size
    megatron_arguments.check_parsed(everything)
    with pytest.raises(UserError, match="no argument 'data_parallel_size', but megatron_vp reads it to "):
        megatron_arguments.check_validated(everything)


def test_validation_asks_for_what_megatron_derives(monkeypatch, capsys):
    from megatron_vp.mcore.options import settle

    monkeypatch.setattr("sys.argv", ["script.py"])
    args = parser().parse_args([])
    args.world_size = 1
    # A Megatron whose validation derives nothing.
    with pytest.raises(UserError, match="has no argument 'rank'"):
        settle.settled_job(lambda args, defaults: args, args, {})
