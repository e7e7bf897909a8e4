"""Test one of Megatron-Bridge's own recipes, at a small size, with and without the plug-in.

Overlapped reduction and gathering and the distributed optimizer stay as in the recipe. It runs on CPU ranks, with the
stand-ins of `bridge_loop`. Without Megatron-Bridge, the tests are skipped.
"""

import contextlib
import io

import numpy as np
import pytest

from tests.harness.ranks import run_ranks
from tests.mcore import bridge_loop
from tests.mcore.test_bridge import BOUND, V_HALF, VOCAB_2, merged, start

pytestmark = pytest.mark.skipif(bridge_loop.missing() is not None, reason=str(bridge_loop.missing()))


def train(_rank, ranks, settings, folder, chunks, accounts):
    start(settings)
    config = bridge_loop.recipe(folder, ranks, chunks, accounts)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        trained = bridge_loop.pretrain(config)
    return (trained.losses, trained.evaluated, trained.gradients), said.getvalue()


@pytest.mark.parametrize(
    ("settings", "chunks", "accounts"),
    [(VOCAB_2, 1, True), (V_HALF, 2, False)],  # of a recipe that balances the vocabulary layers by itself, and without
)
def test_a_recipe_trains_as_without_the_plug_in(tmp_path, settings, chunks, accounts):
    bridge_loop.save_hugging_face(tmp_path)
    plain = run_ranks(2, train, None, str(tmp_path), 1, accounts)
    ours = run_ranks(2, train, settings, str(tmp_path), chunks, accounts)
    plain_losses, plain_evaluated, plain_gradients = merged([trained for trained, _ in plain])
    losses, evaluated, gradients = merged([trained for trained, _ in ours])
    assert len(losses) == 3 and evaluated and gradients.keys() == plain_gradients.keys()
    np.testing.assert_allclose(losses + evaluated, plain_losses + plain_evaluated, rtol=BOUND)
    for name, value in plain_gradients.items():
        assert np.linalg.norm(gradients[name] - value) <= BOUND * np.linalg.norm(value), name
    named = [line for _, said in ours for line in said.splitlines() if "--account-for-embedding" in line]
    assert len(named) == accounts
