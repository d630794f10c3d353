"""Random numbers of examples: the same on workers as in one process."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers.engines import both_engines, per_replica, run

import mirrax as mx

from .comparing import Pool


@both_engines
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_an_example_draws_what_it_draws_in_one_process(
    two_by_two: Pool, engine: str, rows: int
) -> None:
    def draw(strategy):
        def noise(x):
            keys = mx.nn.example_keys(jax.random.key(1), x)
            return jax.vmap(jax.random.uniform)(keys)

        parts = np.array_split(np.zeros(rows, "float32"), 4)
        return run(strategy, noise, per_replica(strategy, *parts), engine=engine)

    two_by_two.assert_as_one(draw)
