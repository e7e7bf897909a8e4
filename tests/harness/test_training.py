"""Test that plain Megatron, the reference of all comparisons, agrees with itself."""

import numpy as np
import pytest

from tests.harness import train
from tests.harness.training import OUTPUT, WORD_EMBEDDING, tiny_model

# Without clipping, because the gradient norm is summed in another order at every pipeline size.
SHARED = {"clip_grad": 0, "eval_iters": 1}


@pytest.mark.parametrize(
    ("untied", "stages"),
    [(True, 4), (False, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 2), (False, 4)))],
)
def test_pipeline_sizes_agree(untied, stages):
    one, many = (
        train(size, tiny_model(**SHARED, untie_embeddings_and_output_weights=untied, pipeline_model_parallel_size=size))
        for size in (1, stages)
    )
    # A tied weight adds the gradients of its two uses in another order where they sit on two ranks.
    near = 0 if untied else 1e-6
    assert len(many.losses) == 3 and many.losses == pytest.approx(one.losses, rel=near, abs=0)
    assert many.steps[0].microbatches == one.steps[0].microbatches
    assert len(many.evaluations) == 2
    np.testing.assert_allclose(many.evaluations, one.evaluations, rtol=near)
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)
    for ours, theirs in zip(many.steps, one.steps, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            size = np.linalg.norm(gradient)
            assert size > 0 and np.linalg.norm(ours.gradients[name] - gradient) <= near * size, name
    assert (OUTPUT in one.parameters) == untied and one.parameters[WORD_EMBEDDING].shape == (512, 32)
