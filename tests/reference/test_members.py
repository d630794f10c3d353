"""docs/names.md says of every public member of TensorFlow's classes what becomes of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.engines import mirrored

import mirrax as mx

from .members import OWNERS, read_states, recorded

STATES = read_states()
MEMBERS = recorded()["members"]


def found_here(owner: str) -> Any:
    """What stands for TensorFlow's `owner` here; an object where members are set in it."""
    strategy = mirrored(2)
    if owner == "tf.Variable":
        with strategy.scope():
            return mx.Variable(1.0)
    if owner == "tf.distribute.StrategyExtended":
        return strategy.extended
    if owner == "tf.data.Options":
        return mx.data.Options()
    found = mx
    for part in owner.split(".")[1:]:
        found = getattr(found, part)
    return found


def has(found: Any, name: str) -> bool:
    return name in dir(found) or hasattr(type(found), name) or hasattr(found, name)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_member_has_a_row_and_no_row_is_too_many(owner):
    assert set(STATES[owner]) == set(MEMBERS[owner])


@pytest.mark.parametrize("owner", OWNERS)
def test_what_the_rows_say_is_true(owner):
    found = found_here(owner)
    here = {name for name, state in STATES[owner].items() if state.word == "here"}
    assert here == {name for name in MEMBERS[owner] if has(found, name)}


@pytest.mark.parametrize("owner", OWNERS)
def test_what_is_not_here_has_a_reason_or_something_to_write(owner):
    for name, state in STATES[owner].items():
        if state.word != "here":
            assert state.text, f"{owner}.{name} is {state.word!r} without a word"
        for path in re.findall(r"`(mx(?:\.\w+)+)", state.text):
            value: Any = mx
            for part in path.split(".")[1:]:
                value = getattr(value, part)
