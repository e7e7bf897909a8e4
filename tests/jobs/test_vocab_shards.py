"""Test the parser of `--vocab-shards`, which all commands share."""

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.vocab_shards import ShardChoice, ShardRule


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (None, ShardChoice(ShardRule.BALANCED)),
        ("balanced", ShardChoice(ShardRule.BALANCED)),
        ("even", ShardChoice(ShardRule.EVEN)),
        ("64,0, 32", ShardChoice(ShardRule.ROWS, (64, 0, 32))),
        ("-8,16", ShardChoice(ShardRule.ROWS, (-8, 16))),  # the sizes of the job say whether rows will do
        (40, ShardChoice(ShardRule.ROWS, (40,))),
    ],
)
def test_every_form_is_read(text, choice):
    assert ShardChoice.parse(text) == choice


@pytest.mark.parametrize("text", ["", "equal", "8,,8", "8;8", "8.5,7.5", "balanced,8", "--8,8", "Even", f"{10**30},8"])
def test_anything_else_is_refused(text):
    with pytest.raises(UserError, match=r"cannot be parsed: use balanced, even, or one number"):
        ShardChoice.parse(text)
