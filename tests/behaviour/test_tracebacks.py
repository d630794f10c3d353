"""What a user sees of an exception in a step: the step, and nothing of the inside of mirrax."""

from __future__ import annotations

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_styles, mirrored, per_replica, run

import mirrax as mx

PARTS = {"even": (np.ones(2), np.ones(2)), "uneven": (np.ones(4), np.ones(3))}
all_parts = pytest.mark.parametrize("parts", PARTS)


def fail(x):
    raise KeyError("my own mistake")


def decide(x, limit=0.0):
    return x if x.sum() > limit else -x


def shown(fn, *args, engine, parts):
    """The exception of a step, and what Python prints of it."""
    strategy = mirrored(2)
    x = per_replica(strategy, *PARTS[parts])
    with pytest.raises(Exception) as caught:
        run(strategy, fn, x, *args, engine=engine)
    return caught.value, "".join(traceback.format_exception(caught.value))


@all_styles
@all_parts
def test_the_users_exception_comes_alone(engine, parts):
    error, text = shown(fail, engine=engine, parts=parts)
    assert isinstance(error, KeyError) and error.__context__ is None
    assert "During handling" not in text and "UnevenError" not in text
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    assert files[-1] == __file__
    assert not any("mirrax/_src" in file for file in files)
    assert "Raised in" in text


def test_what_the_user_was_handling_is_kept():
    def in_its_handler(x):
        try:
            fail(x)
        except KeyError:
            raise ValueError("because of it")  # noqa: B904

    def with_its_cause(x):
        try:
            fail(x)
        except KeyError as error:
            raise ValueError("because of it") from error

    for fn, link in ((in_its_handler, "__context__"), (with_its_cause, "__cause__")):
        error, _ = shown(fn, engine="compiled", parts="uneven")
        assert isinstance(error, ValueError) and isinstance(
            getattr(error, link), KeyError
        )


@all_parts
def test_a_value_that_is_not_known_is_named(parts):
    error, text = shown(decide, 3.0, engine="compiled", parts=parts)
    assert isinstance(error, jax.errors.TracerBoolConversionError)
    assert f"the function decide at {__file__}" in text
    assert "for mx.function" in text
    assert "of the arguments x and limit" in text


def test_variables_and_parts_of_arguments_are_named():
    strategy = mirrored(2)
    with strategy.scope():
        weights = mx.Variable(1.0, name="weights")

    def by_variable(batch, *, scale):
        return 1 if weights > 0 else batch

    def by_part(batch, *, scale):
        return 1 if batch["x"][1] > 0 else batch

    def by_name(batch, *, scale):
        return 1 if scale > 0 else batch

    for fn, name in (
        (by_variable, "variable 'weights'"),
        (by_part, "argument batch['x'][1]"),
        (by_name, "argument scale"),
    ):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            batch = {"x": (1.0, 2.0)}
            strategy.run(mx.function(fn), args=(batch,), kwargs={"scale": 1.0})
        assert f"the value of the {name}." in str(caught.value)


def test_one_setting_shows_everything():
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error, _ = shown(fail, engine="compiled", parts="even")
    finally:
        jax.config.update("jax_traceback_filtering", before)
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    assert any("mirrax/_src" in file for file in files)


def test_a_function_that_is_called_alone():
    step = mx.function(lambda x: x if jnp.all(x) else fail(x))
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        step(jnp.ones(2))
    assert "the function <lambda> at" in str(caught.value)
    files = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("mirrax/_src" in file for file in files)
