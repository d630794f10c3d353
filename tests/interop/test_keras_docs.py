"""The page about Keras: its code runs, and its table of optimizers is right."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interop import libraries
from tests import test_docs

keras = libraries.keras()
optax = pytest.importorskip("optax")
PAGE = Path(test_docs.ROOT) / "docs" / "keras.md"
Keras = keras.optimizers
RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(20, 5)).astype("float32"), RNG.normal(size=20)


def test_the_code_runs():
    test_docs.test_examples_run(PAGE)


def gradient_of(weights):
    return jax.grad(lambda w: jnp.mean((A @ w - B) ** 2))(weights)


def by_keras(optimizer):
    variable = keras.Variable(np.ones(5, "float32"))
    for _ in range(48):
        optimizer.apply([gradient_of(variable.value)], [variable])
    return np.asarray(variable.value)


def by_optax(transformation):
    weights = jnp.ones(5)
    state = transformation.init(weights)
    for _ in range(48):
        updates, state = transformation.update(gradient_of(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    return np.asarray(weights)


def difference(ours, theirs):
    return np.max(np.abs(by_keras(ours) - by_optax(theirs)))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            Keras.SGD(0.1, momentum=0.9, nesterov=True),
            ("sgd", {"momentum": 0.9, "nesterov": True}),
        ),
        (Keras.Adam(0.1), ("adam", {"eps": 1e-7})),
        (Keras.AdamW(0.1), ("adamw", {"eps": 1e-7, "weight_decay": 0.004})),
        (Keras.RMSprop(0.1), ("rmsprop", {"decay": 0.9, "eps": 1e-7})),
        (Keras.Adagrad(0.1), ("adagrad", {"eps": 1e-7})),
        (Keras.Adadelta(0.1), ("adadelta", {"rho": 0.95, "eps": 1e-7})),
        (Keras.Adamax(0.1), ("adamax", {"eps": 1e-7})),
        (Keras.Lion(0.1), ("lion", {"weight_decay": 0.0})),
        (Keras.Lamb(0.1), ("lamb", {"eps": 1e-7})),
        (Keras.Adafactor(0.1), ("adafactor", {"min_dim_size_to_factor": 1})),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_equal_optimizers(ours, theirs):
    name, options = theirs
    assert difference(ours, getattr(optax, name)(0.1, **options)) < 1e-5


def test_equal_wrappers():
    sgd = optax.sgd(0.1)
    for options, theirs in (
        ({"weight_decay": 0.01}, optax.chain(optax.add_decayed_weights(0.01), sgd)),
        ({"global_clipnorm": 0.5}, optax.chain(optax.clip_by_global_norm(0.5), sgd)),
        ({"clipvalue": 0.2}, optax.chain(optax.clip(0.2), sgd)),
        ({"gradient_accumulation_steps": 4}, optax.MultiSteps(sgd, 4)),
    ):
        assert difference(Keras.SGD(0.1, **options), theirs) < 1e-5


def test_unequal_optimizers():
    adam = optax.adam(0.01, eps=1e-3)
    assert difference(Keras.Adam(0.01, epsilon=1e-3), adam) > 1e-3
    assert difference(Keras.Nadam(0.01), optax.nadam(0.01, eps=1e-7)) > 1e-3
    largest = optax.amsgrad(0.01, eps=1e-7)
    assert difference(Keras.Adam(0.01, amsgrad=True), largest) > 1e-3
    momentum = optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, 0.9))
    assert difference(Keras.SGD(0.1, momentum=0.9, weight_decay=0.01), momentum) > 1e-4
