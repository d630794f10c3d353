"""Values of replicas: what they are used as by mistake."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx


@pytest.mark.parametrize("use", [float, int, complex, np.asarray, np.float32])
def test_a_value_of_each_replica_is_not_one_number(use):
    value = mx.distribute.PerReplica([jnp.float32(1.0), jnp.float32(2.0)])
    with pytest.raises(TypeError, match=r"strategy\.reduce\('SUM', value, axis=None\)"):
        use(value)
