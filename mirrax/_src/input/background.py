"""A cursor that reads ahead in a thread.

The thread is a daemon and ends when the cursor is closed or no longer used; an error in it
is raised where the element is asked for, with its own traceback.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from mirrax._src.input.node import Cursor, State

JOIN_SECONDS = 2.0


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
        self._state = cursor.state()
        self._end: _End | None = None
        # Two queues in C are several times as fast as one bounded `queue.Queue`: elements
        # go one way, permissions to make another one go back.
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._permits: SimpleQueue[bool] = SimpleQueue()
        for _ in range(max(size, 1)):
            self._permits.put(True)
        self._thread = threading.Thread(
            target=_read,
            args=(cursor, finish, self._out, self._permits),
            name=f"mirrax-{name}",
            daemon=True,
        )
        self._thread.start()
        self._closer = weakref.finalize(
            self, _stop, self._thread, self._out, self._permits
        )

    def __next__(self) -> Any:
        if self._end is None:
            item = self._out.get()
            if not isinstance(item, _End):
                self._permits.put(True)
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
        self._end = self._end or _End(None)
        self._closer()


def _read(
    cursor: Cursor,
    finish: Callable[[Any], Any],
    out: SimpleQueue[Any],
    permits: SimpleQueue[bool],
) -> None:
    end = _End(None)
    try:
        while permits.get():
            try:
                element = next(cursor)
            except StopIteration:
                break
            out.put((finish(element), cursor.state()))
            del element
    except BaseException as error:
        end = _End(error)
    try:
        cursor.close()
    except BaseException as error:
        end = end if end.error is not None else _End(error)
    out.put(end)


def _stop(
    thread: threading.Thread, out: SimpleQueue[Any], permits: SimpleQueue[bool]
) -> None:
    """Ends the thread; one that is stuck in a user's code is left behind after a while."""
    drain(permits)
    permits.put(False)
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
    drain(out)


def drain(waiting: SimpleQueue[Any]) -> None:
    """Empties a queue."""
    try:
        while True:
            waiting.get_nowait()
    except Empty:
        pass
