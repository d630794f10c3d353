"""Every hook of the process that mirrax uses, except signal handlers.

A program, its other libraries and mirrax share these places: what was there before is
always called as well, and a forked child does not act for its parent.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from mirrax._src.base import jax_compat

around_cpu_start = jax_compat.wrap_cpu_start


def on_uncaught(hook: Callable[[BaseException, Callable[[], None]], None]) -> None:
    """Has `hook(error, show)` called with the exception that ends this process.

    `show()` calls the hook that was there before, which prints the traceback. A forked
    child calls only that.
    """
    previous, process = sys.excepthook, os.getpid()

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == process:
            hook(error, lambda: previous(kind, error, trace))
        else:
            previous(kind, error, trace)

    sys.excepthook = excepthook


def on_exit(fn: Callable[[], None]) -> None:
    """Has `fn` called at the end of this process, but not of a forked child."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            fn()

    atexit.register(call)


def before_threads_end(fn: Callable[[], None]) -> None:
    """Has `fn` called when the main thread ends, in forked children too.

    New threads can still start, unlike in `on_exit`, but not in Python 3.12. Raises a
    RuntimeError afterwards.
    """
    import concurrent.futures.thread  # noqa: F401 - its own hook has to run after this one

    threading._register_atexit(fn)  # type: ignore[attr-defined]


def after_fork_in_child(fn: Callable[[], None]) -> None:
    """Has `fn` called at the start of each forked child."""
    os.register_at_fork(after_in_child=fn)


def around_fork(before: Callable[[], Any], after: Callable[[], Any]) -> None:
    """Has `before` called before each fork, and `after` in both processes."""
    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)


def after_import(name: str, fn: Callable[[], Any]) -> None:
    """Has `fn` called, once, when the module `name` has been imported: now, if it is."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        fn()
    elif not any(isinstance(f, _Watcher) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, fn))


class _Watcher(MetaPathFinder):
    """Finds nothing, but notices when a module is looked for, and calls `fn` once it is there."""

    def __init__(self, name: str, fn: Callable[[], Any]) -> None:
        self.name, self._fn = name, fn

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._fn()

        loader.exec_module = execute_and_call
        return spec
