"""When two answers are the same: the rules that the whole suite rests on."""

from types import SimpleNamespace

import numpy as np
import pytest

from .describe import describe, same

ONE = np.float32(1.0)


def replicas(*values):
    return SimpleNamespace(values=values)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (3, np.int32(3)),
        (np.int64([1, 2]), np.int32([1, 2])),
        (np.float64(0.5), np.float32(0.5)),
        (ONE, np.float32(1.000001)),
        (np.float32(np.nan), np.float32(np.nan)),
        ((ONE, [2]), [ONE, [2]]),
        ({"a": replicas(ONE, 2)}, {"a": replicas(ONE, 2)}),
        (ONE, replicas(ONE, ONE)),
        (ValueError("theirs"), ValueError("ours")),
        (np.float32([]), np.float32([])),
        ("text", "text"),
        (None, None),
    ],
)
def test_the_same(theirs, ours):
    assert same(describe(theirs), describe(ours))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (3, 4),
        (1, True),
        (1, 1.0),
        (ONE, np.float32([1.0])),
        (ONE, np.float32(1.001)),
        (replicas(ONE, 2), replicas(2, ONE)),
        (replicas(ONE, ONE), ONE),
        (ONE, replicas(ONE, np.float32(2.0))),
        (ValueError(), TypeError()),
        (ValueError(), ONE),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 1]),
        (None, 0),
    ],
)
def test_not_the_same(theirs, ours):
    assert not same(describe(theirs), describe(ours))


def test_an_error_is_named_by_the_class_that_users_know():
    jax_error = type("JaxError", (TypeError,), {"__module__": "jax.errors"})
    assert describe(jax_error()) == {"error": "TypeError"}
    assert describe(KeyError) == {"error": "KeyError"}
