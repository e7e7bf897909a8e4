"""Test the records of special options: their conditions, their messages, and that they name options that exist."""

import pytest

from megatron_vp.jobs.known_options import known_options
from megatron_vp.jobs.options import OPTIONS, RUNS, UNCOUNTED, UNREAD, Option, Term

OURS = {"vocab_parallel", "core_attention", "vocab_label_smoothing", "vocab_z_loss"}


@pytest.mark.parametrize(
    ("term", "fits", "others"),
    [
        ("a", [1, "x", [0, 2]], [None, 0, False, [], [0, 0]]),
        ("not a", [None, 0, []], [1, [0, 2]]),
        ("unless a", [None], [1]),
        ("a>1", [2], [None, 0, 1]),
        ("a=x|y", ["x", "y", ["z", "y"]], [None, "z", []]),
        ("a=x|None", ["x", None, []], ["z", ["z"]]),
        ("a!=x", ["z", None], ["x"]),
        ("a!=b", [4], [3]),
    ],
)
def test_a_condition_holds_for_its_values_only(term, fits, others):
    condition = Term.of(term)
    assert all(condition.holds({"a": value, "b": 3}.get) for value in fits)
    assert not any(condition.holds({"a": value, "b": 3}.get) for value in others)


def test_a_message_names_the_options_that_are_given():
    option = Option("a/b>1 and c and not d and unless f or e", "any run", "it is", "leave it out")
    assert [option.found(each.get) for each in ({"c": 1}, {"a": 1, "c": 1, "d": 1}, {})] == [None] * 3
    assert option.message(option.found({"b": 2, "c": 1}.get), "") == (
        "--b 2 and --c without --d cannot work: it is; leave it out"
    )
    assert option.found({"e": True}.get) == "--e"
    several = Option("a/b_c", "our schedules", "why", does="has no effect")
    assert several.message(several.found({"a": 1, "b_c": 2}.get), "--x") == "--a and --b-c has no effect with --x: why"


def test_every_record_is_about_options_that_exist_and_says_what_it_is_for():
    without_option = {"data_parallel_size", "gradient_accumulation_fusion", "create_attention_mask_in_dataloader"}
    known = {*known_options(), *without_option, *OURS}
    for option in OPTIONS:
        assert {term.name for way in option.ways for term in way} <= known, option.given
        assert option.run in {*RUNS, UNREAD} or option.harmless is not None, option.given
        assert option.why or option.run in ("", UNREAD)
    assert UNCOUNTED["experimental_attention_variant"][0] == "gated_delta_net" and UNCOUNTED["sft"] == []
    assert len({(option.given, option.run) for option in OPTIONS}) == len(OPTIONS)
