"""`num_parallel_calls`: a user's function in several threads or processes at a time.

Elements are handed out in order. They come back in order too, or, if that is not asked
for, as they are ready. The state is that before the oldest element that was not delivered,
with the numbers of the later ones that were.
"""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from mirrax._src.input.background import JOIN_SECONDS, drain
from mirrax._src.input.blocks import value_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.node import Cursor, State

AUTOTUNE = -1


class ParallelCursor(Cursor):
    """A pass that calls `fn` on several elements at a time.

    Args:
        open_input: Opens the input, from a state.
        fn: The function.
        calls: How many calls at a time.
        in_order: Whether results are given in the order of the elements.
        workers: "threads" or "processes".
        state: Where to go on from.
    """

    def __init__(
        self,
        open_input: Callable[[State], Cursor],
        fn: Any,
        calls: int,
        in_order: bool,
        workers: str,
        state: State,
    ) -> None:
        start, delivered = state or (None, [])
        self._input = open_input(start)
        calls = num_calls(calls)
        self._pool: Any = (
            _ThreadPool(calls, fn) if workers == "threads" else _ProcessPool(calls, fn)
        )
        self._ahead = calls * self._pool.chunk * 2
        self._in_order = in_order
        self._number = 0  # of elements handed out
        self._waiting: dict[int, tuple[State, concurrent.futures.Future[Any]]] = {}
        self._delivered = set(delivered)  # later than the oldest that was not
        self._ended = False
        self._next_state = start

    def _hand_out(self) -> None:
        while not self._ended and len(self._waiting) < self._ahead:
            before = self._next_state
            try:
                element = value_of(next(self._input))
            except StopIteration:
                self._ended = True
                self._pool.flush()
                return
            self._next_state = self._input.state()
            number, self._number = self._number, self._number + 1
            if number not in self._delivered:
                self._waiting[number] = before, self._pool.submit(element)

    def __next__(self) -> Any:
        self._hand_out()
        if not self._waiting:
            self.close()
            raise StopIteration
        number = next(iter(self._waiting))
        if not self._in_order:
            futures = {w[1]: n for n, w in self._waiting.items()}
            self._pool.flush()
            done, _ = concurrent.futures.wait(
                futures, return_when=concurrent.futures.FIRST_COMPLETED
            )
            number = min(futures[future] for future in done)
        _, future = self._waiting.pop(number)
        if not future.done():
            self._pool.flush()
        if not self._in_order:
            oldest = next(iter(self._waiting), self._number)
            self._delivered = {n for n in {*self._delivered, number} if n > oldest}
        return future.result()

    def state(self) -> State:
        oldest = min(self._waiting, default=self._number)
        start = self._waiting[oldest][0] if self._waiting else self._next_state
        return [start, sorted(n - oldest for n in self._delivered if n > oldest)]

    def close(self) -> None:
        self._ended = True
        self._waiting.clear()
        self._pool.close()
        self._input.close()


def num_calls(calls: int) -> int:
    """The number of calls at a time; `AUTOTUNE` is as many as the machine has cores."""
    return (os.cpu_count() or 1) if calls == AUTOTUNE else calls


class _ThreadPool:
    """Daemon threads: unlike `concurrent.futures`', they never keep a process alive."""

    chunk = 1

    def __init__(self, count: int, fn: Callable[[Any], Any]) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fn = fn
        threads = [
            threading.Thread(
                target=_work, args=(self._tasks, fn), name="mirrax-map", daemon=True
            )
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end_threads, self._tasks, threads)

    def submit(self, element: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._tasks.put((future, element))
        return future

    def flush(self) -> None:
        pass


def _work(tasks: queue.SimpleQueue[Any], fn: Callable[[Any], Any]) -> None:
    while (task := tasks.get()) is not None:
        future, element = task
        try:
            future.set_result(fn(element))
        except BaseException as error:
            future.set_exception(error)
        del task, future, element


def _end_threads(
    tasks: queue.SimpleQueue[Any], threads: list[threading.Thread]
) -> None:
    drain(tasks)
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)


class _ProcessPool:
    """Processes, each given several elements at a time."""

    chunk = 16

    def __init__(self, count: int, fn: Any) -> None:
        try:
            pickle.dumps(fn.fn)
        except Exception as error:
            raise ValueError(
                f'`map(workers="processes")` sends the function to other processes, and '
                f"{fn!r} cannot be pickled ({error}). Define it at the top of a module "
                '(no lambda, no inner function), or use `workers="threads"`.'
            ) from None
        self._fn = fn
        # Not "fork": JAX's threads would be copied in the middle of their work.
        self._executor = concurrent.futures.ProcessPoolExecutor(
            count, mp_context=get_context("spawn")
        )
        self._pending: list[tuple[concurrent.futures.Future[Any], Any]] = []
        self.close = weakref.finalize(
            self, self._executor.shutdown, wait=True, cancel_futures=True
        )

    def submit(self, element: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._pending.append((future, element))
        if len(self._pending) == self.chunk:
            self.flush()
        return future

    def flush(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        elements = [element for _, element in pending]
        results = self._executor.submit(_apply_all, self._fn.fn, elements)
        results.add_done_callback(lambda done: _spread(done, [f for f, _ in pending]))


def _apply_all(fn: Callable[..., Any], elements: list[Any]) -> list[Any]:
    call = ElementFn(fn, "map")
    results: list[Any] = []
    for element in elements:
        try:
            results.append((call(element), None))
        except Exception as error:
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
            results.append((None, error))
    return results


def _spread(done: Any, futures: list[concurrent.futures.Future[Any]]) -> None:
    try:
        for future, (result, error) in zip(futures, done.result()):
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
    except BaseException as error:
        for future in futures:
            if not future.done():
                future.set_exception(error)
