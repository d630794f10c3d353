"""`num_parallel_calls`: a user's function on several elements at a time.

Tasks of one or, if calls are short, of several elements are handed out in order to
threads, or through threads to processes. Results come back in order too, or, if that is not
asked for, as they are ready; then tasks have one element each. The state is that before the
oldest task that was not delivered, with the elements of it and the later tasks that were.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

from mirrax._src.input.background import drain, join_all
from mirrax._src.input.blocks import Block, Singles, join
from mirrax._src.input.node import Cursor, State
from mirrax._src.input.options import AUTOTUNE
from mirrax._src.input.structure import leaves_of

_START: Any = (None, 0, [])
# A task should take this long, so that handing it over costs little, and its results should
# not be larger than this.
_TASK_SECONDS = 1e-3
_TASK_BYTES = 1 << 18


class Outcomes:
    """Where the tasks of one pass put their numbers and results, or errors."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.is_over = False  # nobody waits for them any more


class Failed:
    """The place of a result whose call raised an error."""

    def __init__(self, error: Any) -> None:
        self.error = error


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
        start, given, delivered = state or _START
        self._input = open_input(start)
        # Of the current task, and what was delivered of it before.
        self._start = self._input.state() if start is None else start
        self._input.skip(given)
        self._skipped = given
        self._pool, self._in_order = pool, in_order
        self._waiting: dict[int, State] = {}  # the input's state before each task
        self._done = Outcomes()
        self._ready: dict[int, Any] = {}
        self._number = 0  # of tasks handed out
        self._delivered = set(delivered)  # later than the oldest that was not
        self._chunk = 1  # the elements of the next task
        self._ended = False
        self._current: Block | None = None  # results that are being delivered
        self._given = 0

    def _hand_out(self) -> None:
        while not self._ended and len(self._waiting) < 2 * self._pool.size:
            before = self._input.state() if self._number else self._start
            try:
                block = self._input.next_block(self._chunk)
            except BaseException as error:
                if not self._waiting:
                    raise
                self._late = error  # after the elements before it
                return
            if block is None:
                self._ended = True
                return
            number, self._number = self._number, self._number + 1
            if number not in self._delivered:
                self._waiting[number] = before
                self._pool.submit(number, block, self._done)

    def _advance(self) -> bool:
        """Goes to the next results if the current ones are used up; False at the end."""
        if self._current is not None and self._given < len(self._current):
            return True
        self._current, self._given = None, 0
        if self._late is None:
            self._hand_out()
        if not self._waiting:
            late, self._late = self._late, None
            if late is not None:
                raise late
            return False
        number, result = self._take()
        self._start = self._waiting.pop(number)
        if number:
            self._skipped = 0
        if not self._in_order:
            oldest = next(iter(self._waiting), self._number)
            self._delivered = {n for n in {*self._delivered, number} if n > oldest}
        if isinstance(result, Failed):
            raise result.error
        results, seconds = result
        if self._in_order:
            self._chunk = self._suitable(results, seconds)
        self._current = results
        return True

    def _take(self) -> tuple[int, Any]:
        """The number and the outcome of the task to deliver."""
        if not self._in_order:
            return self._done.queue.get()
        wanted = next(iter(self._waiting))
        while wanted not in self._ready:
            number, outcome = self._done.queue.get()
            self._ready[number] = outcome
        return wanted, self._ready.pop(wanted)

    def _suitable(self, results: Block, seconds: float) -> int:
        """How many elements the next tasks should have, judged by the last one."""
        if _first_failed(results) == 0:
            return self._chunk
        size = sum(map(_size, leaves_of(results.row(0).value())))
        by_time = _TASK_SECONDS * len(results) / max(seconds, 1e-9)
        most = min(
            self._pool.most, 2 * self._chunk, by_time, _TASK_BYTES / max(size, 1)
        )
        return max(1, int(most))

    def __next__(self) -> Any:
        block = self.next_block(1)
        if block is None:
            raise StopIteration
        return block.row(0)

    def next_block(self, count: int) -> Block | None:
        found: list[Block] = []
        while count and self._advance():
            assert self._current is not None
            asked = self._current[self._given : self._given + count]
            part = asked[: _first_failed(asked)]
            if not len(part) and not found:
                raise self._take_error(asked)
            self._given += len(part)
            count -= len(part)
            found.append(part)
            if len(part) < len(asked):
                break  # the error comes next
        return join(found) if found else None

    def _take_error(self, asked: Block) -> BaseException:
        """The error that stands first; kept here it would keep alive whoever it passes."""
        assert isinstance(asked.table, Singles)
        self._given += 1
        position = asked.index[0]
        failed, asked.table.elements[position] = asked.table.elements[position], None
        return failed.error

    def state(self) -> State:
        is_used_up = self._current is None or self._given >= len(self._current)
        if not is_used_up or not self._number:
            return [self._start, self._skipped + self._given, []]
        oldest = min(self._waiting, default=self._number)
        start = self._waiting.get(oldest)
        later = sorted(n - oldest for n in self._delivered if n > oldest)
        return [self._input.state() if start is None else start, 0, later]

    def close(self) -> None:
        self._ended, self._current = True, None
        self._done.is_over = True
        self._waiting.clear()
        self._ready.clear()
        if self._pool.is_of_one_pass:
            self._pool.close()
        self._input.close()


def _first_failed(results: Block) -> int | None:
    """Where the first error stands among results."""
    if isinstance(results.table, Singles):
        for position, i in enumerate(results.index):
            if isinstance(results.table.elements[i], Failed):
                return position
    return None


def _size(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes) else leaf.nbytes


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

    def submit(self, number: int, block: Block, done: Outcomes) -> None:
        """Calls the function on `block` in the next free thread; the result goes to `done`."""
        self._tasks.put((number, block, done))


def call_on_rows(fn: Callable[[Any], Any]) -> Callable[[Block], Block]:
    """`fn` of each row of a block."""

    def call(block: Block) -> Block:
        return Block(Singles(outcomes(fn, block.elements())), range(len(block)))

    return call


def outcomes(fn: Callable[[Any], Any], elements: Iterable[Any]) -> list[Any]:
    """What `fn` gives for each element: a result, or `Failed`."""
    found: list[Any] = []
    for element in elements:
        try:
            found.append(fn(element))
        except BaseException as error:
            found.append(Failed(error))
    return found


def _work(tasks: SimpleQueue[Any], call: Callable[[Block], Block]) -> None:
    while (task := tasks.get()) is not None:
        number, block, done = task
        if done.is_over:
            continue
        start = time.perf_counter()
        try:
            outcome: Any = call(block), time.perf_counter() - start
        except BaseException as error:
            outcome = Failed(error)
        done.queue.put((number, outcome))
        del task, block, done, outcome


def _end_threads(tasks: SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    drain(tasks)
    for _ in threads:
        tasks.put(None)
    join_all(threads)
