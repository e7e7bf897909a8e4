"""Test the store: every slot is used, and values that cannot belong to this iteration are refused."""

import ast
from pathlib import Path

import pytest

from megatron_vp import runtime
from megatron_vp.runtime.links import CONTENT
from megatron_vp.runtime.store import Slot, Store


def slots_of(verb):
    """The slots that the runtime's calls of `put` or `take` name, and those of results in a list."""
    for path in Path(*runtime.__path__).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == verb
            listed = verb == "put" and isinstance(node, ast.Tuple)
            slot = next(iter(node.args if called else node.elts if listed else ()), None)
            if isinstance(slot, ast.Attribute) and isinstance(slot.value, ast.Name) and slot.value.id == "Slot":
                yield Slot[slot.attr]


@pytest.mark.parametrize("verb", ["put", "take"])
def test_every_slot_is_put_and_taken(verb):
    received = {slot for slot, _ in CONTENT.values()} if verb == "put" else set()
    assert {*slots_of(verb), *received} == set(Slot)


def test_a_value_lives_from_its_put_to_its_last_use():
    store = Store()
    store.put(Slot.X, 1, "x", uses=2)
    store.put(Slot.ACTIVATION, 1, "three", at=3)
    with pytest.raises(AssertionError, match="X of microbatch 1 is already in the store"):
        store.put(Slot.X, 1, "another")
    assert store.take(Slot.X, 1) == store.take(Slot.X, 1) == "x"
    with pytest.raises(
        AssertionError, match="X of microbatch 1 is not in the store: it was taken too early or too often"
    ):
        store.take(Slot.X, 1)
    with pytest.raises(AssertionError, match="ACTIVATION of microbatch 1 at 4 is not in the store"):
        store.take(Slot.ACTIVATION, 1, at=4)
    with pytest.raises(AssertionError, match=r"left in the store .*ACTIVATION of microbatch 1 at 3"):
        store.assert_empty()
    assert store.take(Slot.ACTIVATION, 1, at=3) == "three"
    store.put(Slot.STATISTICS, 1, "nobody takes it", uses=0)
    store.assert_empty()
