"""Work in threads: a cursor that reads ahead, and a pool for users' functions.

Threads are daemons and end when their cursor is closed or no longer used; an error in one
is raised where the element is asked for, with its own traceback.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from mirrax._src.input.node import Cursor, State

_POLL_SECONDS = 0.5
_JOIN_SECONDS = 5.0


class _End:
    """What a thread puts last: why it ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Ahead(Cursor):
    """Reads `cursor` in a thread, at most `size` elements ahead.

    Each element travels with the state after it, so the state here is that of the
    elements that were delivered, whatever has been read ahead.

    Args:
        cursor: What to read.
        size: The elements that may wait.
        finish: Applied to each element in the thread.
        name: What the thread is called.
    """

    def __init__(
        self,
        cursor: Cursor,
        size: int,
        finish: Callable[[Any], Any] = lambda element: element,
        name: str = "prefetch",
    ) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(size, 1))
        self._state = cursor.state()
        self._end: _End | None = None
        stop = threading.Event()
        self._thread = threading.Thread(
            target=_read,
            args=(cursor, finish, self._queue, stop),
            name=f"mirrax-{name}",
            daemon=True,
        )
        self._thread.start()
        self._closer = weakref.finalize(self, _stop, self._thread, stop, self._queue)

    def __next__(self) -> Any:
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                element, self._state = item
                return element
            self._end = item
            self.close()
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def state(self) -> State:
        return self._state

    def close(self) -> None:
        self._closer()


def _read(
    cursor: Cursor,
    finish: Callable[[Any], Any],
    out: queue.Queue[Any],
    stop: threading.Event,
) -> None:
    end = _End(None)
    try:
        while not stop.is_set():
            try:
                element = next(cursor)
            except StopIteration:
                break
            _put(out, (finish(element), cursor.state()), stop)
            del element
    except BaseException as error:
        end = _End(error)
    finally:
        try:
            cursor.close()
        except BaseException as error:
            end = end if end.error is not None else _End(error)
        _put(out, end, stop)


def _put(out: queue.Queue[Any], item: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            return out.put(item, timeout=_POLL_SECONDS)
        except queue.Full:
            continue


def _stop(
    thread: threading.Thread, stop: threading.Event, out: queue.Queue[Any]
) -> None:
    """Ends the thread; one that is stuck in a user's code is left behind after a while."""
    stop.set()
    try:
        while True:
            out.get_nowait()
    except queue.Empty:
        pass
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
