"""How often XLA compiles, as JAX itself reports it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """`count` is how many programs XLA has compiled so far, in any thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.count += event == _COMPILED


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts inside the `with` block.

    with count_compilations() as compiled:
        jax.jit(lambda x: x + 1)(1.0)
    assert compiled.count == 1
    """
    compiled = Compilations()
    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)


def compilations_after_warm_up(
    step: Callable[[int], Any], warm_up: int = 2, steps: int = 4
) -> int:
    """How often XLA compiles in `steps` calls of `step(k)`, after `warm_up` others."""
    for k in range(warm_up):
        step(k)
    with count_compilations() as compiled:
        for k in range(warm_up, warm_up + steps):
            step(k)
    return compiled.count
