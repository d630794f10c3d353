"""Logical CPU devices, asked for once and through `mx.config`, like a user."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx
from mirrax._src.engines.dispatch import eager_runs
from mirrax._src.state.foreign import settings
from mirrax._src.train.writer import wait_for_saves
from tests.helpers.programs import compile_quickly, share_programs

compile_quickly()
share_programs()
mx.config.set_logical_device_configuration(cpu=8)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test leaves a scope, a thread or a switch behind."""
    eager_runs.clear()  # tests run the same code very often
    _forget_models()
    yield
    wait_for_saves()
    assert not mx.distribute.has_strategy(), "a test left a scope open"
    assert not mx.config.functions_run_eagerly(), (
        "a test left functions running eagerly"
    )
    left = _threads()
    if (
        left
    ):  # an iterator in a cycle, say with the traceback of an error; or just ending
        gc.collect()
        time.sleep(0.05)
        left = _threads()
    assert not left, f"threads are left: {left}"


def _forget_models() -> None:
    """Of other tests: one that is collected meanwhile would have functions traced again."""
    for noted in (settings._owners, settings._first, settings._changed):
        noted.clear()
    settings.token = frozenset()


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("mirrax")]


@pytest.fixture
def two_cpus() -> mx.MirroredStrategy:
    return mx.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace: dict) -> None:
    doctest_namespace.update(mx=mx, jnp=jnp, np=np, os=os, tempfile=tempfile)
