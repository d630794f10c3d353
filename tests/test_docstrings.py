"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import tempfile
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.modules import importable_modules

import mirrax as mx

NAMES = {"mx": mx, "jnp": jnp, "np": np, "os": os, "tempfile": tempfile}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples() -> Iterator[doctest.DocTest]:
    """The docstrings with examples, each once, wherever the object says it lives."""
    finder = doctest.DocTestFinder(recurse=False)
    seen: set[int] = set()
    for module_name in importable_modules():
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            home = inspect.getmodule(value)
            if home is None or not home.__name__.startswith("mirrax"):
                continue
            members = vars(value).items() if inspect.isclass(value) else ()
            for path, item in [
                (name, value),
                *((f"{name}.{k}", v) for k, v in members),
            ]:
                item = item.fget if isinstance(item, property) else item
                if not callable(item) or id(item) in seen:
                    continue
                seen.add(id(item))
                for test in finder.find(item, path, globs=NAMES):
                    if test.examples:
                        yield test


EXAMPLES = list(examples())
pytestmark = pytest.mark.filterwarnings("ignore:.*(is the older|has nothing to do)")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_docstring(example: doctest.DocTest) -> None:
    shown: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(example, out=shown.append)
    assert runner.failures == 0, "".join(shown)


def test_the_main_methods_have_examples() -> None:
    names = {test.name for test in EXAMPLES}
    for method in ("run", "reduce", "gather", "scope", "replicate"):
        assert f"Strategy.{method}" in names
