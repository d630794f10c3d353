"""What `fit` reads: the same batches on all workers, and `mx.data.Dataset`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def install() -> None:
    pass


def agree_on_randomness(strategy: Any) -> None:
    """Has all workers draw the random numbers of the first one: Keras shuffles by them."""
    cluster = strategy.replica_mesh.cluster
    if cluster is None or not strategy.replica_mesh.spans_workers:
        return
    torch = sys.modules.get("torch")
    own: list[Any] = []
    if cluster.worker == 0:
        kind, keys, *rest = np.random.get_state()
        own = [[kind, np.asarray(keys).tolist(), *rest], random.getstate()]
        own.append(torch.get_rng_state().tolist() if torch else None)
    first = cluster.agree("the random numbers of `fit`", own)[0]
    if cluster.worker == 0:
        return
    kind, keys, *rest = first[0]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    version, state, gauss = first[1]
    random.setstate((version, tuple(state), gauss))
    if torch and first[2] is not None:
        torch.set_rng_state(torch.tensor(first[2], dtype=torch.uint8))
