"""One thread at a time launches programs, reads and assigns variables."""

from __future__ import annotations

import threading

from mirrax._src.base.jax_compat import is_thread_of_xla

_IN_CALLBACK = (
    "A host callback (`jax.debug.callback`, `pure_callback`, `io_callback`) uses a variable or "
    "runs a function of mirrax. Both may have to wait for the program that waits for the "
    "callback, for ever. Pass what the callback needs to it as an argument, as in "
    "`jax.debug.callback(log, v.read_value())`, and assign variables with what it returns."
)

# Two threads that start programs at the same time would need n more threads in XLA's pool.
_lock = threading.RLock()
_thread = threading.local()


def launching() -> threading.RLock:
    """The lock, for `with launching():`.

    Raises:
        RuntimeError: In a callback of a program. Whoever has the lock may wait until that
            callback has returned: JAX lets about 32 programs wait on a CPU.
    """
    check_caller()
    return _lock


def check_caller() -> None:
    """Raises in a callback of a program, unless that runs on the thread that has called it."""
    if not hasattr(_thread, "is_pythons"):
        if is_thread_of_xla():
            raise RuntimeError(_IN_CALLBACK)
        _thread.is_pythons = True
