"""Test the parser of `--vocab-shards`, which all commands share."""

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.vocab_shards import shards_of


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (None, "balanced"),
        ("balanced", "balanced"),
        ("even", "even"),
        ("64,0, 32", (64, 0, 32)),
        ("-8,16", (-8, 16)),  # the sizes of the job say whether rows will do
        (40, (40,)),
    ],
)
def test_every_form_is_read(text, choice):
    assert shards_of(text) == choice


@pytest.mark.parametrize("text", ["", "equal", "8,,8", "8;8", "8.5,7.5", "balanced,8", "--8,8", "Even", f"{10**30},8"])
def test_anything_else_is_refused(text):
    with pytest.raises(UserError, match=r"cannot be parsed: use balanced, even, measured:DIR, or one number"):
        shards_of(text)
