"""A cursor that reads ahead in a thread.

Whoever has nothing better to do makes the next element: the thread while its owner is
busy, the owner itself when it finds nothing ready and the thread is not at work. Handing
an element over costs two switches between threads, which would be most of the time where
the owner waits for data anyway. Where no core is free for a thread, it begins to read only
when elements have been slow.

The thread is a daemon and ends when the cursor is closed or no longer used; an error in it
is raised where the element is asked for, with its own traceback.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from mirrax._src.input.node import Cursor, State

JOIN_SECONDS = 1.0
# How long the thread leaves the next element to its owner, which may come back at once;
# doubled each time the owner is found at work.
_FIRST_WAIT_SECONDS = 2e-4
_LONGEST_WAIT_SECONDS = 1e-2
_RETRY_SECONDS = 0.05
# Where no core is free a thread reads ahead after so many elements that took so long, if they
# took such a part of the time: others are made as quickly by their owner. Less may only mean that
# another thread had the core.
_SLOW_SECONDS = 5e-3
_SLOW_ELEMENTS = 3
_SLOW_PART = 0.1


class _End:
    """What is put last: why there is no more."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Failed:
    """In the place of an element that could not be made."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Line:
    """A cursor that two threads take turns at, and what it has given so far."""

    def __init__(
        self,
        cursor: Cursor,
        size: int,
        finish: Callable[[Any], Any],
        keeps_going: bool,
        if_slow: bool,
    ) -> None:
        self.cursor, self._finish, self._keeps_going = cursor, finish, keeps_going
        self._size, self._if_slow = size, if_slow
        self._slow_elements, self._slow_seconds = 0, 0.0
        self._begin: float | None = None
        self.lock = threading.Lock()  # held by who makes an element
        self.ready: SimpleQueue[Any] = SimpleQueue()
        self.permits: SimpleQueue[bool] = SimpleQueue()  # to make one that will wait
        self.stop = threading.Event()
        self.has_ended = False
        if not if_slow:
            self._permit_all()

    def _permit_all(self) -> None:
        for _ in range(self._size):
            self.permits.put(True)

    def make(self) -> Any:
        """The next element with the state after it, or the end; the lock is held."""
        try:
            element = self._finish(next(self.cursor))
            return element, self.cursor.state()
        except StopIteration:
            return self.end(None)
        except BaseException as error:
            if self._keeps_going and isinstance(error, Exception):
                return _Failed(error), self.cursor.state()
            return self.end(error)

    def make_for_owner(self) -> Any:
        """The same, for an owner that found nothing ready."""
        if not self._if_slow:
            return self.make()
        before = time.perf_counter()
        item = self.make()
        now = time.perf_counter()
        if self._begin is None:  # the first one is slow where it prepares a pass
            self._begin = now
        elif now - before > _SLOW_SECONDS:
            self._slow_elements += 1
            self._slow_seconds += now - before
            is_much = self._slow_seconds > _SLOW_PART * (now - self._begin)
            if is_much and self._slow_elements >= _SLOW_ELEMENTS:
                self._if_slow = False
                self._permit_all()
        return item

    def end(self, error: BaseException | None) -> _End:
        self.has_ended = True
        try:
            self.cursor.close()
        except BaseException as late:
            error = error or late
        return _End(error)


class Ahead(Cursor):
    """Reads `cursor` in a thread, at most `size` elements ahead.

    Each element travels with the state after it, so the state here is that of the
    elements that were delivered, whatever has been read ahead.

    Args:
        cursor: What to read.
        size: The elements that may wait.
        finish: Applied to each element where it is made.
        name: What the thread is called.
        keeps_going: Whether there are more elements after one that raised an error.
        if_slow: Whether the thread waits until some elements have been slow.
    """

    def __init__(
        self,
        cursor: Cursor,
        size: int,
        finish: Callable[[Any], Any] = lambda element: element,
        name: str = "prefetch",
        keeps_going: bool = False,
        if_slow: bool = False,
    ) -> None:
        self._state = cursor.state()
        self._end: _End | None = None
        self._line = _Line(cursor, max(size, 1), finish, keeps_going, if_slow)
        thread = threading.Thread(
            target=_work_ahead, args=(self._line,), name=f"mirrax-{name}", daemon=True
        )
        thread.start()
        self._closer = weakref.finalize(self, _stop, thread, self._line)

    def __next__(self) -> Any:
        if self._end is None:
            item = self._take()
            if not isinstance(item, _End):
                element, self._state = item
                if isinstance(element, _Failed):
                    raise element.error
                return element
            self._end = item
            self.close()
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def _take(self) -> Any:
        line = self._line
        while True:
            try:
                item = line.ready.get_nowait()
                line.permits.put(True)
                return item
            except Empty:
                pass
            if line.lock.acquire(blocking=False):
                try:
                    if line.ready.empty():
                        line.cursor.is_awaited = True
                        return _End(None) if line.has_ended else line.make_for_owner()
                finally:
                    line.cursor.is_awaited = False
                    line.lock.release()
                continue
            try:  # the thread is at work
                line.cursor.is_awaited = True
                item = line.ready.get(timeout=_RETRY_SECONDS)
                line.permits.put(True)
                return item
            except Empty:
                pass
            finally:
                line.cursor.is_awaited = False

    def state(self) -> State:
        return self._state

    def close(self) -> None:
        self._end = self._end or _End(None)
        self._closer()


def _work_ahead(line: _Line) -> None:
    while line.permits.get() and _get_turn(line):
        try:
            if line.has_ended:
                return
            line.ready.put(line.make())
        finally:
            line.lock.release()
    with line.lock:
        if not line.has_ended:
            line.ready.put(line.end(None))


def _get_turn(line: _Line) -> bool:
    """Takes the lock when the owner is away; False when there is nothing to do any more."""
    wait = _FIRST_WAIT_SECONDS
    while True:
        time.sleep(wait)
        if line.stop.is_set():
            return False
        if line.lock.acquire(blocking=False):
            return True
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _stop(thread: threading.Thread, line: _Line) -> None:
    """Ends the thread; one that is stuck in a user's code is left behind after a while."""
    line.stop.set()
    line.cursor.interrupt()
    drain(line.permits)
    line.permits.put(False)
    join_all([thread])
    drain(line.ready)


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Waits for threads to end, not longer than `JOIN_SECONDS` for all of them."""
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def drain(waiting: SimpleQueue[Any]) -> None:
    """Empties a queue."""
    try:
        while True:
            waiting.get_nowait()
    except Empty:
        pass
