"""Programs of `examples/` without the seconds in which each imports the same libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.forking import Zygote

LIBRARIES = ("sklearn.datasets", "flax.linen", "flax.nnx", "flax.training.train_state")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Runs programs in processes that have imported everything; one a file is run alone."""
    with Zygote(f"import {', '.join(LIBRARIES)}") as zygote:
        yield zygote
