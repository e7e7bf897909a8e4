"""Test that `--hybrid-layer-pattern` is parsed as by Megatron."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    Symbols,
    get_hybrid_total_layer_count,
    get_hybrid_total_pipeline_segment_count,
    parse_hybrid_pattern,
)

from megatron_vp.errors import UserError
from megatron_vp.jobs.pattern_text import LETTERS, Pattern, pattern_in


def test_the_letters_are_megatrons():
    assert set(LETTERS) == Symbols.VALID_LAYERS


@given(st.text("*-EMGD+|/x", min_size=1, max_size=12))
def test_patterns_are_read_as_megatron_reads_them(text):
    try:
        theirs = parse_hybrid_pattern(text)
        if not get_hybrid_total_layer_count(text):
            theirs = None  # a model without layers, which no pipeline can train
    except ValueError:
        theirs = None
    if theirs is None:
        with pytest.raises(UserError, match="--hybrid-layer-pattern"):
            Pattern.parse(text)
        return
    ours = Pattern.parse(text)
    assert len(ours.letters) == get_hybrid_total_layer_count(text)
    assert len(ours.layers or [0]) == get_hybrid_total_pipeline_segment_count(text)
    assert (ours.heads[0] if ours.heads else None, len(ours.heads)) == (theirs.mtp_pattern, theirs.mtp_num_depths)
    if ours.layers:
        assert Pattern.parse(ours.with_bars(ours.layers)) == ours
        assert "|".join(ours.segments(ours.layers)) == theirs.main_pattern


def test_the_older_name_is_the_same_argument():
    found = Pattern("*-*-", (2, 2))
    assert pattern_in({"hybrid_layer_pattern": "*-|*-"}) == pattern_in({"hybrid_override_pattern": "*-|*-"}) == found
    assert pattern_in({"num_layers": 4}) is None
    with pytest.raises(UserError, match="old name"):
        pattern_in({"hybrid_layer_pattern": "*-", "hybrid_override_pattern": "*-*-"})


def test_bars_move_and_heads_stay():
    pattern = Pattern.parse("*-*-*-/*-/*-")
    assert pattern.with_bars((1, 2, 3)) == "*|-*|-*-/*-/*-"
