"""One thread at a time launches programs, reads and assigns variables.

A step that calls Python code of the user's on the host (`jax.debug.callback`, `pure_callback`,
`io_callback`) is waited for. Otherwise that code would wait for a thread that is held up launching
steps behind this one, and find variables as some later step leaves them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Any

import jax

from mirrax._src.base.jax_compat import in_host_callback

# Two threads that start programs at the same time would need n more threads in XLA's pool.
_lock = threading.RLock()
# The numbers of the variables that a step which calls back updates; None while none runs.
_updates: Collection[int] | None = None


def launching() -> contextlib.AbstractContextManager[Any]:
    """The lock; code that a step calls needs none, since the step has it."""
    if _updates is not None and in_host_callback():
        return contextlib.nullcontext()
    return _lock


@contextlib.contextmanager
def calling_back(updates: Collection[int]) -> Iterator[None]:
    """For a step that calls Python code of the user's, and is waited for in the `with` block."""
    global _updates
    with launching():
        before, _updates = _updates, updates
        try:
            yield
        finally:
            _updates = before


def wait_for(*arrays: Any) -> None:
    """Waits for a step that calls back: for what it gives, and its calls, if it gives nothing."""
    jax.block_until_ready(arrays)
    jax.effects_barrier()


def is_updated_by_caller(number: int) -> bool:
    """Whether this code is called by a step that updates the variable of that number."""
    return _updates is not None and number in _updates and in_host_callback()
