"""Test the loop of GRPO in `examples`: losses with and without vocabulary parallelism, and rewards."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.harness.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


def printed(_rank, _ranks, *flags):
    """Run the example, and return the rewards, losses and entropies of all steps."""
    from megatron_vp.mcore import patch_table, patches

    patches.apply(patch_table.patches_of("cpu platform"))
    with mock.patch.object(sys, "argv", [str(EXAMPLE), *flags]):
        return np.array(runpy.run_path(str(EXAMPLE))["history"])


def test_losses_of_samples_drawn_once_are_those_of_plain_megatron():
    _, ours = run_ranks(2, printed, "--vocab-parallel", "--draw-once")
    _, plain = run_ranks(2, printed, "--draw-once")
    assert ours.shape == (50, 3)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)
    assert len(set(ours[:, 1])) > 40


@pytest.mark.slow
def test_rewards_of_live_samples_rise():
    _, found = run_ranks(2, printed, "--vocab-parallel")
    rewards = found[:, 0]
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.2
