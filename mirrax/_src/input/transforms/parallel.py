"""`num_parallel_calls`: a user's function on several elements at a time.

Tasks are handed out in order to threads, or through threads to processes. Results come
back in order too, or, if that is not asked for, as they are ready. The state is that
before the oldest task that was not delivered, with the numbers of the later ones that were.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from mirrax._src.input.background import JOIN_SECONDS, drain
from mirrax._src.input.blocks import Block, Singles, join
from mirrax._src.input.node import Cursor, State
from mirrax._src.input.structure import leaves_of

AUTOTUNE = -1
_CHUNK_BYTES = 1 << 18  # so that what waits stays small
# What a task puts into the queue that it was given: its number, its results or its error.
Done = SimpleQueue[tuple[int, Any]]
_START: Any = (None, 0, [], 0, 0)


class ParallelCursor(Cursor):
    """A pass that calls a function on several elements at a time.

    Args:
        open_input: Opens the input, from a state.
        pool: Where the function runs.
        in_order: Whether results are given in the order of the elements.
        state: Where to go on from.
    """

    def __init__(
        self,
        open_input: Callable[[State], Cursor],
        pool: ThreadPool,
        in_order: bool,
        state: State,
    ) -> None:
        start, chunk, delivered, given, first = state or _START
        self._input = open_input(start)
        self._pool, self._in_order = pool, in_order
        # The elements of a task. 0: not known; the first goes alone, its result will tell.
        self._chunk = chunk or int(pool.most == 1)
        self._waiting: dict[int, State] = {}  # the input's state before each
        self._done: Done = SimpleQueue()
        self._ready: dict[int, Any] = {}
        self._number = 0  # of tasks handed out
        self._delivered = set(delivered)  # later than the oldest that was not
        self._next_state = self._input.state()
        self._ended = False
        self._current: Block | None = (
            None  # results of the task that is being delivered
        )
        self._current_start: State = self._next_state
        self._given = 0
        self._current_number = -1
        self._first = first if given else None  # the task that was delivered in part
        if given:
            self._advance()
            self._given = given

    def _hand_out(self) -> None:
        most = 2 * self._pool.size if self._chunk else 1
        while not self._ended and len(self._waiting) < most:
            before = self._next_state
            block = self._input.next_block(self._chunk or 1)
            if block is None:
                self._ended = True
                return
            self._next_state = self._input.state()
            number, self._number = self._number, self._number + 1
            if number not in self._delivered:
                self._waiting[number] = before
                self._pool.submit(number, block, self._done)

    def _advance(self) -> bool:
        """Goes to the next results if the current ones are used up; False at the end."""
        if self._current is not None and self._given < len(self._current):
            return True
        self._current, self._given = None, 0
        self._hand_out()
        if not self._waiting:
            return False
        number, result = self._take()
        self._current_start = self._waiting.pop(number)
        self._current_number = number
        if not self._in_order:
            oldest = next(iter(self._waiting), self._number)
            later = {n for n in {*self._delivered, number} if n > oldest}
            self._delivered = later
        if isinstance(result, BaseException):
            raise result
        self._current = result
        if not self._chunk:
            self._chunk = self._pool.chunk_for(result.row(0).value())
            self._number, self._delivered, self._current_number = 0, set(), -1
        return True

    def _take(self) -> tuple[int, Any]:
        """The number and the results of the task to deliver."""
        if not self._in_order and self._first is None:
            if self._ready:
                return self._ready.popitem()
            return self._done.get()
        wanted = next(iter(self._waiting)) if self._first is None else self._first
        self._first = None
        while wanted not in self._ready:
            number, result = self._done.get()
            self._ready[number] = result
        return wanted, self._ready.pop(wanted)

    def __next__(self) -> Any:
        if not self._advance():
            raise StopIteration
        assert self._current is not None
        self._given += 1
        return self._current.row(self._given - 1)

    def next_block(self, count: int) -> Block | None:
        found = []
        while count and self._advance():
            assert self._current is not None
            part = self._current[self._given : self._given + count]
            self._given += len(part)
            count -= len(part)
            found.append(part)
        return join(found) if found else None

    def state(self) -> State:
        starts = dict(self._waiting)
        in_part = self._current is not None and self._given < len(self._current)
        if in_part:
            starts[self._current_number] = self._current_start
        oldest = min(starts, default=self._number)
        later = [n - oldest for n in sorted(self._delivered) if n > oldest]
        if in_part and self._current_number - oldest in later:
            later.remove(self._current_number - oldest)
        return [
            starts.get(oldest, self._next_state),
            self._chunk,
            later,
            self._given if in_part else 0,
            self._current_number - oldest if in_part else 0,
        ]

    def close(self) -> None:
        self._ended, self._current = True, None
        self._waiting.clear()
        self._ready.clear()
        if self._pool.is_of_one_pass:
            self._pool.close()
        self._input.close()


def num_calls(calls: int) -> int:
    """The number of calls at a time; `AUTOTUNE` is as many as the machine has cores."""
    return (os.cpu_count() or 1) if calls == AUTOTUNE else calls


class ThreadPool:
    """Daemon threads: unlike `concurrent.futures`', they never keep a process alive.

    Args:
        calls: What each thread calls with a block to get a block of results.
        most: The most elements of one task.
        is_of_one_pass: Whether the threads end with the pass that they serve.
    """

    def __init__(
        self,
        calls: list[Callable[[Block], Block]],
        most: int,
        is_of_one_pass: bool = True,
    ) -> None:
        self.size, self.most = len(calls), most
        self.is_of_one_pass = is_of_one_pass
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        threads = [
            threading.Thread(
                target=_work,
                args=(self._tasks, call),
                name="mirrax-map",
                daemon=True,
            )
            for call in calls
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end_threads, self._tasks, threads)

    def chunk_for(self, result: Any) -> int:
        """How many elements a task should have whose results are like this one."""
        size = sum(
            len(leaf) if isinstance(leaf, bytes) else leaf.nbytes
            for leaf in leaves_of(result)
        )
        return max(1, min(self.most, _CHUNK_BYTES // max(size, 1)))

    def submit(self, number: int, block: Block, done: Done) -> None:
        """Calls the function on `block` in the next free thread; the result goes to `done`."""
        self._tasks.put((number, block, done))


def call_on_rows(fn: Callable[[Any], Any]) -> Callable[[Block], Block]:
    """`fn` of each row of a block."""

    def call(block: Block) -> Block:
        results = [fn(element) for element in block.elements()]
        return Block(Singles(results), range(len(results)))

    return call


def _work(tasks: SimpleQueue[Any], call: Callable[[Block], Block]) -> None:
    while (task := tasks.get()) is not None:
        number, block, done = task
        try:
            done.put((number, call(block)))
        except BaseException as error:
            done.put((number, error))
        del task, block, done


def _end_threads(tasks: SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    drain(tasks)
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
