"""`mx.nn.example_keys`: what an example draws does not depend on who computes it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_styles, both_engines, mirrored, per_replica, run
from helpers.hlo import compiled_text, count
from property.examples import IS_THOROUGH

import mirrax as mx

KEYS = {"new": jax.random.key, "old": jax.random.PRNGKey}


def dropped(x, step=0):
    keys = mx.nn.example_keys(jax.random.fold_in(jax.random.key(3), step), x)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    return jnp.where(kept, x * 2, 0.0)


def in_parts(strategy, x):
    return per_replica(strategy, *np.array_split(x, strategy.num_replicas_in_sync))


# Fewer rows than replicas, more of them, and numbers that replicas divide or not.
SIZES = [(1, 7), (2, 1), (2, 8), (3, 2), (3, 7), (4, 1), (4, 8)]
ALL_SIZES = list(itertools.product([1, 2, 3, 4], [1, 2, 7, 8]))


@all_styles
@pytest.mark.parametrize(("replicas", "rows"), ALL_SIZES if IS_THOROUGH else SIZES)
def test_dropout_is_that_of_one_device(replicas, rows, engine):
    x = np.random.default_rng(0).normal(size=(rows, 5)).astype("float32")
    strategy = mirrored(replicas)
    found = run(strategy, dropped, in_parts(strategy, x), engine=engine)
    together = np.concatenate(strategy.experimental_local_results(found))
    np.testing.assert_array_equal(together, dropped(x))


def test_every_example_and_every_step_has_its_own():
    x = np.ones((6, 40), "float32")
    rows = np.concatenate([dropped(x), dropped(x, step=1)])
    assert len({row.tobytes() for row in rows}) == 12


@both_engines
@pytest.mark.parametrize("kind", KEYS)
def test_both_kinds_of_keys(engine, kind):
    def draw(x):
        keys = mx.nn.example_keys(KEYS[kind](0), {"a": x, "b": [x[:, 0]]})
        return jax.vmap(jax.random.uniform)(keys)

    strategy, x = mirrored(2), np.zeros((4, 2), "float32")
    found = run(strategy, draw, in_parts(strategy, x), engine=engine)
    np.testing.assert_array_equal(
        np.concatenate(strategy.experimental_local_results(found)), draw(x)
    )


def test_equal_parts_of_a_compiled_step_do_not_communicate():
    strategy = mirrored(2)
    step = mx.function(dropped)
    x = in_parts(strategy, np.ones((4, 3), "float32"))
    strategy.run(step, args=(x,))
    text = compiled_text(step, strategy, x)
    assert not count(text, "all-gather") and not count(text, "all-reduce")


def test_a_number_of_examples():
    keys = mx.nn.example_keys(jax.random.key(0), 3)
    assert keys.shape == (3,)
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == 3
    assert mx.nn.example_keys(jax.random.key(0), 0).shape == (0,)


def test_mistakes():
    key = jax.random.key(0)
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="outside of replicas"):
        mx.nn.example_keys(key, 3)
    with pytest.raises(ValueError, match=r"one and the same number.*\(3,\), \(4, 2\)"):
        mx.nn.example_keys(key, (jnp.ones(3), jnp.ones((4, 2))))
    with pytest.raises(ValueError, match=r"\(\)"):
        mx.nn.example_keys(key, jnp.ones(()))
