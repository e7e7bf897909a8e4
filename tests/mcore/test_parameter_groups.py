"""Test optimizer state that is loaded with another learning rate: which rate each parameter group gets."""

from __future__ import annotations

import pytest

from megatron_vp.mcore.storage.parameter_groups import with_the_same_rates


def group(max_lr, min_lr=0.0, **changes):
    return {"max_lr": max_lr, "min_lr": min_lr, "wd_mult": 1.0, "is_decoupled_lr": False, **changes}


def rates(groups):
    return [(each["max_lr"], each["min_lr"]) for each in groups]


@pytest.mark.parametrize(("keeps_loaded", "expected"), [(False, 5e-4), (True, 1e-3)])
def test_groups_get_the_rates_of_the_run_or_of_the_checkpoint(keeps_loaded, expected):
    ours, loaded = [group(5e-4), group(5e-4, wd_mult=0.0)], [group(1e-3, wd_mult=0.0), group(1e-3)]
    with_the_same_rates(ours, loaded, keeps_loaded)
    assert rates(ours) == rates(loaded) == [(expected, 0.0)] * 2


def test_a_group_with_rates_of_its_own_keeps_apart_from_the_others():
    ours = [group(5e-4, 1e-5), group(1e-4, is_decoupled_lr=True)]
    loaded = [group(2e-3, is_decoupled_lr=True), group(1e-3, 1e-5)]
    with_the_same_rates(ours, loaded, False)
    assert rates(loaded) == [(1e-4, 0.0), (5e-4, 1e-5)]


def test_groups_that_only_their_rates_tell_apart_are_paired_in_the_order_of_the_rates():
    ours, loaded = [group(4e-3), group(2e-3)], [group(1e-3), group(2e-3)]
    with_the_same_rates(ours, loaded, False)
    assert rates(loaded) == [(2e-3, 0.0), (4e-3, 0.0)]
    with_the_same_rates(ours, [group(1e-3), group(2e-3)], True)
    assert rates(ours) == [(2e-3, 0.0), (1e-3, 0.0)]


def test_equal_rates_stay_as_they_are():
    ours, loaded = [group(1e-3), group(2e-3)], [group(2e-3), group(1e-3)]
    with_the_same_rates(ours, loaded, True)
    assert rates(ours) == [(1e-3, 0.0), (2e-3, 0.0)] and rates(loaded) == [(2e-3, 0.0), (1e-3, 0.0)]
